// Values that become new objects on their way to a kernel, and comparison with schema defaults.
#include "values.h"

#include <torch/csrc/Size.h>

namespace hotop {

namespace {

constexpr Py_ssize_t kLargestSpare = 64;

PyListObject* as_list(PyObject* object) { return reinterpret_cast<PyListObject*>(object); }

// A list without elements and with room for `size`. Making one costs three times as much as
// filling it, so the argument's last one is taken when nobody else kept it.
PyRef empty_list(Argument& argument, Py_ssize_t size) {
  PyRef spare = std::move(argument.spare_list);
  if (spare && Py_REFCNT(spare.get()) == 1 && Py_SIZE(spare.get()) == 0 &&
      as_list(spare.get())->allocated >= size) {
    return spare;
  }
  auto fresh = PyRef::steal(PyList_New(size));
  if (fresh) Py_SET_SIZE(as_list(fresh.get()), 0);
  return fresh;
}

bool is_sequence_of(Kind element_kind, PyObject* source) {
  return PyList_CheckExact(source) || PyTuple_CheckExact(source) ||
         (element_kind == Kind::Int && Py_IS_TYPE(source, &THPSizeType));
}

// `fit_element(element, &out)` gives a new reference to what stands in the copy.
template <Kind element_kind, typename FitElement>
HOTOP_INLINE Fit copy_list(Argument& argument, PyObject** value, FitElement fit_element) {
  PyObject* source = *value;
  if (!is_sequence_of(element_kind, source)) return Fit::No;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(source);
  PyRef copy = empty_list(argument, size);
  if (!copy) return Fit::Error;
  // An allocation may have run the collector, and a finalizer may have changed the source.
  if (HOTOP_UNLIKELY(PySequence_Fast_GET_SIZE(source) != size)) return Fit::No;
  PyObject** places = as_list(copy.get())->ob_item;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Fit fit = fit_element(PySequence_Fast_GET_ITEM(source, i), &places[i]);
    if (HOTOP_UNLIKELY(fit != Fit::Replaced)) {
      while (i > 0) Py_DECREF(places[--i]);
      return fit;
    }
  }
  Py_SET_SIZE(as_list(copy.get()), size);
  *value = copy.release();
  return Fit::Replaced;
}

template <Kind element_kind>
Fit copy_scalars(Argument& argument, PyObject** value) {
  return copy_list<element_kind>(argument, value, [](PyObject* element, PyObject** out) {
    *out = element;
    if (HOTOP_UNLIKELY(!fits_as_is(element_kind, element))) return fit_scalar(element_kind, out);
    Py_INCREF(element);
    return Fit::Replaced;
  });
}

Fit copy_tensors(Argument& argument, PyObject** value, TensorFacts* facts) {
  const bool none_allowed = argument.kind == Kind::OptionalTensorList;
  return copy_list<Kind::Tensor>(argument, value, [&](PyObject* element, PyObject** out) {
    if (HOTOP_LIKELY(is_exact_tensor(element))) {
      facts->add(element);
    } else if (!none_allowed || element != Py_None) {
      return Fit::No;
    }
    Py_INCREF(element);
    *out = element;
    return Fit::Replaced;
  });
}

bool equal_lists(Kind element_kind, PyObject* value, PyObject* default_value) {
  if (!PyList_CheckExact(value) || !PyList_CheckExact(default_value)) return false;
  const Py_ssize_t size = PyList_GET_SIZE(value);
  if (size != PyList_GET_SIZE(default_value)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!equals_default(element_kind, PyList_GET_ITEM(value, i),
                        PyList_GET_ITEM(default_value, i))) {
      return false;
    }
  }
  return true;
}

}  // namespace

Fit fit_scalar(Kind kind, PyObject** value) {
  switch (kind) {
    case Kind::Int:
      if (!PyBool_Check(*value)) return Fit::No;
      *value = PyLong_FromLong(*value == Py_True);
      return Fit::Replaced;
    case Kind::Float: {
      double number = 0;
      if (PyBool_Check(*value)) {
        number = *value == Py_True;
      } else if (PyLong_CheckExact(*value) && surely_int64(*value)) {
        number = PyLong_AsDouble(*value);
      } else {
        return Fit::No;
      }
      *value = PyFloat_FromDouble(number);
      return *value != nullptr ? Fit::Replaced : Fit::Error;
    }
    case Kind::Str:
      // Not ASCII: PyTorch carries it as UTF-8, which not every str has.
      if (!PyUnicode_CheckExact(*value)) return Fit::No;
      if (PyUnicode_AsUTF8(*value) == nullptr) {
        PyErr_Clear();
        return Fit::No;
      }
      return Fit::AsIs;
    default:
      return Fit::No;
  }
}

Fit fit_list(Argument& argument, PyObject** value, TensorFacts* facts) {
  switch (argument.kind) {
    case Kind::TensorList:
    case Kind::OptionalTensorList:
      return copy_tensors(argument, value, facts);
    case Kind::IntList:
      return copy_scalars<Kind::Int>(argument, value);
    case Kind::FloatList:
      return copy_scalars<Kind::Float>(argument, value);
    case Kind::BoolList:
      return copy_scalars<Kind::Bool>(argument, value);
    default:
      return Fit::No;
  }
}

void give_back(Argument& argument, PyObject* made) {
  auto owned = PyRef::steal(made);
  if (!PyList_CheckExact(made) || Py_REFCNT(made) != 1 || argument.spare_list) return;
  PyListObject* list = as_list(made);
  if (list->allocated == 0 || list->allocated > kLargestSpare) return;
  // Letting elements go may run finalizers; meanwhile the list is an ordinary empty one.
  const Py_ssize_t size = Py_SIZE(list);
  const Py_ssize_t room = std::exchange(list->allocated, 0);
  PyObject** places = std::exchange(list->ob_item, nullptr);
  Py_SET_SIZE(list, 0);
  for (Py_ssize_t i = 0; i < size; ++i) Py_DECREF(places[i]);
  if (HOTOP_UNLIKELY(list->ob_item != nullptr)) {
    PyMem_Free(places);
    return;
  }
  list->ob_item = places;
  list->allocated = room;
  if (!argument.spare_list) argument.spare_list = std::move(owned);
}

bool equals_default(Kind kind, PyObject* value, PyObject* default_value) {
  if (kind != Kind::Float && kind != Kind::Scalar && value == default_value) return true;
  if (value == Py_None || default_value == Py_None) return value == default_value;
  switch (kind) {
    case Kind::Int:
      return PyLong_AsLongLong(value) == PyLong_AsLongLong(default_value);
    case Kind::Float:
      return PyFloat_AS_DOUBLE(value) == PyFloat_AS_DOUBLE(default_value);
    case Kind::Str:
      return PyUnicode_Compare(value, default_value) == 0;
    case Kind::Scalar:
      return Py_TYPE(value) == Py_TYPE(default_value) &&
             PyObject_RichCompareBool(value, default_value, Py_EQ) == 1;
    case Kind::Device:
      return reinterpret_cast<THPDevice*>(value)->device ==
             reinterpret_cast<THPDevice*>(default_value)->device;
    case Kind::IntList:
      return equal_lists(Kind::Int, value, default_value);
    case Kind::FloatList:
      return equal_lists(Kind::Float, value, default_value);
    case Kind::BoolList:
      return equal_lists(Kind::Bool, value, default_value);
    default:
      return false;
  }
}

}  // namespace hotop
