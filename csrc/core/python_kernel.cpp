// The dispatcher's holder of a kernel written in Python, whose class PyTorch does not declare.
//
// Its layout is written down here a second time. `learn_python_kernels` compares it with two
// kernels whose functions are known; until that succeeded no kernel is read.
#include "python_kernel.h"

#include <c10/core/SafePyObject.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>

#include <optional>

#include "torch_compat.h"

namespace hotop {

namespace {

struct PythonKernelHolder : c10::OperatorKernel {
  c10::SafePyObject function;
  c10::DispatchKey key;
  bool with_keyset;
  bool with_op;
};

using TypeMark = const void*;

TypeMark holder_type = nullptr;  // null: not learned
std::optional<c10::KernelFunction> autograd_fallback;

TypeMark type_mark(const c10::OperatorKernel* functor) {
  return *reinterpret_cast<const TypeMark*>(functor);  // its table of virtual functions
}

const PythonKernelHolder& as_holder(const c10::OperatorKernel* functor) {
  return *static_cast<const PythonKernelHolder*>(functor);
}

const c10::OperatorKernel* functor_at(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return kernel_functor(operator_entry(op).kernelForDispatchKey(key)).get();
}

// learn_python_kernels(name, function, has_fallback) -> bool: `function` is the kernel of this
// operator at CPU, and at CUDA with the key set as its first argument; at AutogradCPU it has
// PyTorch's fallback, or has_fallback is false.
PyObject* learn_python_kernels(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  PyObject* function = nullptr;
  int has_fallback = 0;
  if (!PyArg_ParseTuple(args, "sOp:learn_python_kernels", &name, &function, &has_fallback)) {
    return nullptr;
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const auto* plain = functor_at(op, c10::DispatchKey::CPU);
  const auto* keyed = functor_at(op, c10::DispatchKey::CUDA);
  if (plain == nullptr || keyed == nullptr || type_mark(plain) != type_mark(keyed)) {
    Py_RETURN_FALSE;
  }
  const auto& first = as_holder(plain);
  const auto& second = as_holder(keyed);
  const bool known = reinterpret_cast<PyObject* const&>(first.function) == function &&
                     reinterpret_cast<PyObject* const&>(second.function) == function &&
                     first.key == c10::DispatchKey::CPU && second.key == c10::DispatchKey::CUDA &&
                     !first.with_keyset && second.with_keyset && !first.with_op && !second.with_op;
  holder_type = known ? type_mark(plain) : nullptr;
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::AutogradCPU);
  const int index = keys.getDispatchTableIndexForDispatchKeySet();
  if (known && has_fallback && index >= 0) {
    autograd_fallback = dispatch_table(operator_entry(op))[index];
  }
  return PyBool_FromLong(known);
  END_HANDLE_TH_ERRORS
}

// has_python_kernel(name, overload_name) -> bool: one stands in the operator's table, where a call
// with real data can meet it.
PyObject* has_python_kernel(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  const char* overload_name = nullptr;
  if (!PyArg_ParseTuple(args, "ss:has_python_kernel", &name, &overload_name)) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload_name);
  using Key = c10::DispatchKey;
  for (const Key key : {Key::CPU, Key::CUDA, Key::XPU, Key::HPU, Key::PrivateUse1, Key::AutogradCPU,
                        Key::AutogradCUDA}) {
    const auto keys = c10::DispatchKeySet(key);
    const int index = keys.getDispatchTableIndexForDispatchKeySet();
    if (index < 0) continue;
    const auto& kernel = dispatch_table(operator_entry(op))[index];
    const auto* functor = kernel_functor(kernel).get();
    if (functor != nullptr && type_mark(functor) == holder_type) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// python_kernel(name, overload_name, key): the function that was registered there, or None.
PyObject* python_kernel(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  const char* overload_name = nullptr;
  const char* key = nullptr;
  if (!PyArg_ParseTuple(args, "sss:python_kernel", &name, &overload_name, &key)) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload_name);
  const auto& entry = operator_entry(op);
  const auto parsed = c10::parseDispatchKey(key);
  if (!entry.hasKernelForDispatchKey(parsed)) Py_RETURN_NONE;
  const auto* functor = kernel_functor(entry.kernelForDispatchKey(parsed)).get();
  if (functor == nullptr || type_mark(functor) != holder_type) Py_RETURN_NONE;
  return PyRef::borrow(as_holder(functor).function.ptr(getPyInterpreter())).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyObject* python_function_of(const c10::OperatorKernel* functor) {
  if (functor == nullptr || holder_type == nullptr || type_mark(functor) != holder_type) {
    return nullptr;
  }
  const auto& holder = as_holder(functor);
  if (holder.with_keyset || holder.with_op) return nullptr;
  return holder.function.ptr(getPyInterpreter());
}

bool is_autograd_fallback(const c10::KernelFunction& kernel) {
  return autograd_fallback.has_value() && kernel._equalsBoxedAndUnboxed(*autograd_fallback);
}

PyMethodDef python_kernel_functions[] = {
    {"learn_python_kernels", learn_python_kernels, METH_VARARGS, nullptr},
    {"has_python_kernel", has_python_kernel, METH_VARARGS, nullptr},
    {"python_kernel", python_kernel, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
