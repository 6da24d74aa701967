// A call that an autocast rule of the op takes up first: what the kernel of
// CustomOpDef.register_autocast does, in C++.
#include "autocast.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "py_warnings.h"
#include "values.h"

namespace hotop {

namespace {

PyRef cast_tensor(const Kernel& rule, PyObject* value) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  const c10::ScalarType dtype = tensor.scalar_type();
  const bool eligible = c10::isFloatingType(dtype) && dtype != at::kDouble &&
                        tensor.device().type() == rule.cast_device;
  if (!eligible) return PyRef::borrow(value);
  at::Tensor result;
  with_python_warnings([&] {
    py::gil_scoped_release no_gil;
    result = tensor.to(rule.cast_dtype);
  });
  return result.is_same(tensor) ? PyRef::borrow(value) : PyRef::steal(THPVariable_Wrap(result));
}

PyRef cast_value(const Kernel& rule, Kind kind, PyObject* value) {
  if (is_tensor(value)) return cast_tensor(rule, value);
  if (kind != Kind::TensorList && kind != Kind::OptionalTensorList) return PyRef::borrow(value);
  // The cast releases the GIL, and the list may be the caller's: a tuple stays as it is.
  auto elements = PyRef::steal(PySequence_Tuple(value));
  if (!elements) return elements;
  const Py_ssize_t size = PyTuple_GET_SIZE(elements.get());
  auto list = PyRef::steal(PyList_New(size));
  for (Py_ssize_t i = 0; list && i < size; ++i) {
    auto element = cast_value(rule, Kind::Tensor, PyTuple_GET_ITEM(elements.get(), i));
    if (!element) return element;
    PyList_SET_ITEM(list.get(), i, element.release());
  }
  return list;
}

}  // namespace

PyObject* cast_and_call(const Call& call, int positional,
                        const std::function<PyObject*(PyObject* const*, size_t)>& again) try {
  const Plan& plan = *call.plan;
  const Kernel& rule = *call.kernel;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(rule.cast_key);
  std::vector<PyRef> cast;
  c10::SmallVector<PyObject*, 16> values{nullptr};
  cast.reserve(positional);
  for (int i = 0; i < positional; ++i) {
    auto value = cast_value(rule, plan.arguments[i].kind, call.values[i]);
    if (!value) return nullptr;
    values.push_back(value.get());
    cast.push_back(std::move(value));
  }
  return again(values.data() + 1, positional | PY_VECTORCALL_ARGUMENTS_OFFSET);
} catch (const std::exception&) {
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

}  // namespace hotop
