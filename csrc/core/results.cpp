// What a kernel returned: the checks and conversions that PyTorch makes, off the common road.
#include "results.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace hotop {

namespace {

// Lets Python run PyTorch's own check; it raises when the result may not be returned.
bool passes_pytorch_check(const Plan& plan, const Kernel* kernel, PyObject* const* args,
                          Py_ssize_t nargs, PyObject* kwnames, PyObject* result) {
  auto positional = PyRef::steal(PyTuple_New(nargs));
  auto keywords = PyRef::steal(PyDict_New());
  if (!positional || !keywords) return false;
  for (Py_ssize_t i = 0; i < nargs; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(positional.get(), i, args[i]);
  }
  const Py_ssize_t keyword_count = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  for (Py_ssize_t i = 0; i < keyword_count; ++i) {
    if (PyDict_SetItem(keywords.get(), PyTuple_GET_ITEM(kwnames, i), args[nargs + i]) < 0) {
      return false;
    }
  }
  auto checked =
      PyRef::steal(PyObject_CallFunctionObjArgs(plan.check_result.get(), kernel->device_type.get(),
                                                positional.get(), keywords.get(), result, nullptr));
  return static_cast<bool>(checked);
}

// One crossing of the border between Python and the dispatcher, with its type checks and texts.
py::object cross_dispatcher(const Plan& plan, const py::object& result) {
  const auto& types = plan.return_types;
  torch::jit::Stack stack;
  if (types.empty()) {
    TORCH_CHECK(result.is_none(), "Expected PythonKernelHolder for ", plan.name,
                " to return None but it returned something else instead.");
  } else if (types.size() == 1) {
    stack.push_back(torch::jit::toIValue(result, types[0]));
  } else {
    const auto results = py::cast<py::sequence>(result);
    TORCH_CHECK(results.size() == types.size(), plan.name, ": the kernel returned ", results.size(),
                " values, but the schema declares ", types.size());
    for (size_t i = 0; i < results.size(); ++i) {
      stack.push_back(torch::jit::toIValue(results[i], types[i]));
    }
  }
  return torch::jit::createPyObjectForStack(std::move(stack));
}

}  // namespace

PyObject* finish_uncommon(Plan& plan, Kernel* kernel, PyObject* const* args, Py_ssize_t nargs,
                          PyObject* kwnames, PyObject* result) {
  auto owned = PyRef::steal(result);
  if (plan.obligation != Obligation::Nothing &&
      !passes_pytorch_check(plan, kernel, args, nargs, kwnames, result)) {
    return nullptr;
  }
  return convert_result(plan, result);
}

PyObject* convert_result(const Plan& plan, PyObject* result) {
  HANDLE_TH_ERRORS
  // Not what a boxed call further out has set for its own operator.
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(plan.numbers_as_tensors);
  try {
    return cross_dispatcher(plan, py::reinterpret_borrow<py::object>(result)).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  }
  return nullptr;
  END_HANDLE_TH_ERRORS
}

}  // namespace hotop
