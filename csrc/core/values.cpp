// Values that become new objects on their way to a kernel, and comparison with schema defaults.
#include "values.h"

#include <torch/csrc/Size.h>

namespace hotop {

namespace {

// list, tuple or torch.Size of scalars -> a new list
template <Kind element_kind>
Fit convert_scalar_list(PyObject** value) {
  PyObject* source = *value;
  if (!PyList_CheckExact(source) && !PyTuple_CheckExact(source) &&
      !(element_kind == Kind::Int && Py_IS_TYPE(source, &THPSizeType))) {
    return Fit::No;
  }
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(source);
  auto copy = PyRef::steal(PyList_New(size));
  if (!copy) return Fit::Error;
  // The allocation may have run the collector, and a finalizer may have changed the source.
  if (HOTOP_UNLIKELY(PySequence_Fast_GET_SIZE(source) != size)) return Fit::No;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* element = PySequence_Fast_GET_ITEM(source, i);
    if (HOTOP_LIKELY(fits_as_is(element_kind, element))) {
      Py_INCREF(element);
    } else {
      const Fit fit = fit_by_conversion(element_kind, &element, nullptr);
      if (fit != Fit::Replaced) return fit;
    }
    PyList_SET_ITEM(copy.get(), i, element);
  }
  *value = copy.release();
  return Fit::Replaced;
}

// list or tuple of Tensors -> a new list of the same Tensors
Fit copy_tensor_list(bool none_allowed, PyObject** value, TensorFacts* facts) {
  PyObject* source = *value;
  if (!PyList_CheckExact(source) && !PyTuple_CheckExact(source)) return Fit::No;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(source);
  auto copy = PyRef::steal(PyList_New(size));
  if (!copy) return Fit::Error;
  if (HOTOP_UNLIKELY(PySequence_Fast_GET_SIZE(source) != size)) return Fit::No;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* element = PySequence_Fast_GET_ITEM(source, i);
    if (HOTOP_LIKELY(is_exact_tensor(element))) {
      facts->add(element);
    } else if (!none_allowed || element != Py_None) {
      return Fit::No;
    }
    Py_INCREF(element);
    PyList_SET_ITEM(copy.get(), i, element);
  }
  *value = copy.release();
  return Fit::Replaced;
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

Fit fit_by_conversion(Kind kind, PyObject** value, TensorFacts* facts) {
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
    case Kind::TensorList:
      return copy_tensor_list(false, value, facts);
    case Kind::OptionalTensorList:
      return copy_tensor_list(true, value, facts);
    case Kind::IntList:
      return convert_scalar_list<Kind::Int>(value);
    case Kind::FloatList:
      return convert_scalar_list<Kind::Float>(value);
    case Kind::BoolList:
      return convert_scalar_list<Kind::Bool>(value);
    default:
      return Fit::No;
  }
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
