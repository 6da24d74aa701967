// A guard around the autograd kernel: it is made when first needed, and forward-mode tangents are
// refused, not dropped.
#include "autograd_guard.h"

#include "thread_state.h"
#include "torch_compat.h"
#include "values.h"

namespace hotop {

namespace {

bool tensor_has_tangent(PyObject* value) {
  if (!is_tensor(value)) return false;
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

// True when a tangent could belong to one of these: a floating or complex Tensor.
bool any_differentiable(PyObject* result) {
  if (is_tensor(result)) {
    const c10::ScalarType dtype = THPVariable_Unpack(result).scalar_type();
    return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  }
  if (!PyTuple_Check(result) && !PyList_Check(result)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); ++i) {
    if (any_differentiable(PySequence_Fast_GET_ITEM(result, i))) return true;
  }
  return false;
}

// self is [kernel or None, make, refuse, mutates]. Not a Python function, so that Dynamo sees no
// frame that PyTorch's own kernel would not have.
PyObject* call_guarded(PyObject* self, PyObject* args, PyObject* kwargs) {
  const bool dual =
      HOTOP_UNLIKELY(any_tangent(args)) && thread_state().autograd->get_fw_grad_mode();
  PyObject* refuse = PyList_GET_ITEM(self, 2);
  if (dual && PyList_GET_ITEM(self, 3) == Py_True) return PyObject_CallNoArgs(refuse);
  if (HOTOP_UNLIKELY(PyList_GET_ITEM(self, 0) == Py_None)) {
    PyObject* made = PyObject_CallNoArgs(PyList_GET_ITEM(self, 1));
    if (made == nullptr || PyList_SetItem(self, 0, made) < 0) return nullptr;
  }
  auto kernel = PyRef::borrow(PyList_GET_ITEM(self, 0));
  auto result = PyRef::steal(PyObject_Call(kernel.get(), args, kwargs));
  if (dual && result && any_differentiable(result.get())) return PyObject_CallNoArgs(refuse);
  return result.release();
}

PyMethodDef guarded_definition = {
    "autograd_kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_guarded)),
    METH_VARARGS | METH_KEYWORDS, nullptr};

// guarded_autograd_kernel(make, refuse, mutates): calls make()'s kernel, made at the first call.
// Calls `refuse()` when a tangent would be lost: on an op that mutates, or with a result that
// could have one.
PyObject* guarded_autograd_kernel(PyObject*, PyObject* args) {
  PyObject* make = nullptr;
  PyObject* refuse = nullptr;
  PyObject* mutates = nullptr;
  if (!PyArg_ParseTuple(args, "OOO!:guarded_autograd_kernel", &make, &refuse, &PyBool_Type,
                        &mutates)) {
    return nullptr;
  }
  auto self = PyRef::steal(Py_BuildValue("[OOOO]", Py_None, make, refuse, mutates));
  return self ? PyCFunction_New(&guarded_definition, self.get()) : nullptr;
}

}  // namespace

PyMethodDef autograd_functions[] = {
    {"guarded_autograd_kernel", guarded_autograd_kernel, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
