// Argument values: which objects a kernel may receive as they are, and which become new objects.
#pragma once

#include <Python.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include "plan.h"
#include "python_compat.h"

namespace hotop {

// Exactly torch.Tensor or torch.nn.Parameter: any other class may want to see the call itself.
HOTOP_INLINE bool is_exact_tensor(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

// Any Tensor by its real type. THPVariable_Check asks the value's `__class__`, which may run
// Python, lie, or raise (a dead weakref.proxy): a C++ exception in the middle of C frames.
HOTOP_INLINE bool is_tensor(PyObject* value) {
  return is_exact_tensor(value) ||
         PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

HOTOP_INLINE c10::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

HOTOP_INLINE const c10::StorageImpl* storage_of(PyObject* tensor) {
  return impl_of(tensor)->unsafe_storage().unsafeGetStorageImpl();
}

// What the Tensors of one call have in common.
struct TensorFacts {
  c10::DispatchKeySet keys;
  bool any_autograd_meta = false;

  HOTOP_INLINE void add(PyObject* tensor) {
    c10::TensorImpl* impl = impl_of(tensor);
    keys = keys | impl->key_set();
    any_autograd_meta |= impl->autograd_meta() != nullptr;
  }
};

// A str that PyTorch can carry as UTF-8.
HOTOP_INLINE bool is_plain_str(PyObject* value) {
  return PyUnicode_CheckExact(value) && PyUnicode_IS_READY(value) &&
         PyUnicode_IS_COMPACT_ASCII(value);
}

HOTOP_INLINE bool is_list(Kind kind) { return kind >= Kind::TensorList && kind < Kind::Other; }

// Outcome of looking at one value. `Replaced`: `*value` is a new reference.
enum class Fit : uint8_t { AsIs, Replaced, No, Error };

// The kinds that are not a Tensor and never need a new object are answered here.
HOTOP_INLINE bool fits_as_is(Kind kind, PyObject* value) {
  switch (kind) {
    case Kind::Int:
      return PyLong_CheckExact(value) && fits_int64(value);
    case Kind::Float:
      return PyFloat_CheckExact(value);
    case Kind::Bool:
      return PyBool_Check(value);
    case Kind::Str:
      return is_plain_str(value);
    case Kind::Scalar:
      return PyFloat_CheckExact(value) || PyBool_Check(value) || PyComplex_CheckExact(value) ||
             (PyLong_CheckExact(value) && fits_int64(value));
    case Kind::Dtype:
      return Py_IS_TYPE(value, &THPDtypeType);
    case Kind::Layout:
      return Py_IS_TYPE(value, &THPLayoutType);
    case Kind::MemoryFormat:
      return Py_IS_TYPE(value, &THPMemoryFormatType);
    case Kind::Device:
      return Py_IS_TYPE(value, &THPDeviceType);
    default:
      return false;
  }
}

// A bool becomes an int, an int a float; a str that is not ASCII is looked at.
Fit fit_scalar(Kind kind, PyObject** value);

// A list becomes a new list of the same elements, or of converted ones.
Fit fit_list(Argument& argument, PyObject** value, TensorFacts* facts);

// Ends the life of what `fit_scalar` or `fit_list` made for this argument.
void give_back(Argument& argument, PyObject* made);

// True when PyTorch would drop this value from a call because it equals the schema's default.
bool equals_default(Kind kind, PyObject* value, PyObject* default_value);

}  // namespace hotop
