// Forward-mode tangents on a call's arguments, for the autograd kernel written in Python.
#include "tangent.h"

#include "torch_compat.h"
#include "values.h"

namespace hotop {

namespace {

bool tensor_has_tangent(PyObject* value) {
  if (!THPVariable_Check(value)) return false;
  const auto* meta = impl_of(value)->autograd_meta();
  return meta != nullptr && has_tangent(meta);
}

// any_tangent(args): true when a Tensor in the tuple, or in a list in it, has a tangent.
PyObject* any_tangent(PyObject*, PyObject* args) {
  if (!PyTuple_Check(args)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* value = PyTuple_GET_ITEM(args, i);
    if (tensor_has_tangent(value)) Py_RETURN_TRUE;
    if (!PyList_Check(value)) continue;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(value); ++j) {
      if (tensor_has_tangent(PyList_GET_ITEM(value, j))) Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
}

}  // namespace

PyMethodDef tangent_functions[] = {
    {"any_tangent", any_tangent, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
