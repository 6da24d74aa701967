// A guard around the autograd kernel: forward-mode tangents are refused, not dropped.
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

bool any_tangent(PyObject* args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* value = PyTuple_GET_ITEM(args, i);
    if (tensor_has_tangent(value)) return true;
    if (!PyList_Check(value)) continue;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(value); ++j) {
      if (tensor_has_tangent(PyList_GET_ITEM(value, j))) return true;
    }
  }
  return false;
}

// self is (kernel, refuse). Not a Python function, so that Dynamo sees no frame that PyTorch's own
// kernel would not have.
PyObject* call_guarded(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (HOTOP_UNLIKELY(any_tangent(args))) {
    return PyObject_CallNoArgs(PyTuple_GET_ITEM(self, 1));
  }
  return PyObject_Call(PyTuple_GET_ITEM(self, 0), args, kwargs);
}

PyMethodDef guarded_definition = {
    "autograd_kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_guarded)),
    METH_VARARGS | METH_KEYWORDS, nullptr};

// guard_tangents(kernel, refuse): calls `kernel`, or `refuse()` when a Tensor has a tangent.
PyObject* guard_tangents(PyObject*, PyObject* args) {
  PyObject* kernel = nullptr;
  PyObject* refuse = nullptr;
  if (!PyArg_ParseTuple(args, "OO:guard_tangents", &kernel, &refuse)) return nullptr;
  auto self = PyRef::steal(PyTuple_Pack(2, kernel, refuse));
  return self ? PyCFunction_New(&guarded_definition, self.get()) : nullptr;
}

}  // namespace

PyMethodDef tangent_functions[] = {
    {"guard_tangents", guard_tangents, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
