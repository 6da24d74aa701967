// The dispatcher's holder of a kernel written in Python, whose class PyTorch does not declare.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <Python.h>

namespace hotop {

// The function of a kernel that was registered from Python and takes the operator's arguments and
// nothing else; borrowed. Null: it is another kind of kernel.
PyObject* python_function_of(const c10::OperatorKernel* functor);

// PyTorch's autograd kernel for every operator that has none of its own: it records a warning when
// an input requires grad, and otherwise only passes the call on.
bool is_autograd_fallback(const c10::KernelFunction& kernel);

extern PyMethodDef python_kernel_functions[];

}  // namespace hotop
