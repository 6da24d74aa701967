// A direct call that autograd records: PyTorch's own autograd.Function of the op, whose forward is
// the function below. The node, its ctx, saved Tensors, hooks and backward are all PyTorch's.
#include "recorded.h"

namespace hotop {

namespace {

// The call that is about to become a forward.
struct Pending {
  const Plan& plan;
  const Call& call;
  const Outgoing& outgoing;
  const std::function<PyObject*()>& run;
};

thread_local const Pending* pending = nullptr;

PyRef default_of(const Argument& argument) {
  PyObject* value = argument.default_value.get();
  return PyList_CheckExact(value) ? PyRef::steal(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)))
                                  : PyRef::borrow(value);
}

PyRef value_of(const Plan& plan, const Call& call, int position) {
  PyObject* value = position < call.count ? call.values[position] : nullptr;
  return value != nullptr ? PyRef::borrow(value) : default_of(plan.arguments[position]);
}

// setup_context(ctx=, inputs=, [keyword_only_inputs=,] output=), defaults filled in.
bool set_up(const Plan& plan, const Call& call, PyObject* ctx, PyObject* output) {
  const int total = static_cast<int>(plan.arguments.size());
  auto inputs = PyRef::steal(PyTuple_New(plan.positional_count));
  auto arguments = PyRef::steal(PyDict_New());
  if (!inputs || !arguments) return false;
  for (int i = 0; i < plan.positional_count; ++i) {
    auto value = value_of(plan, call, i);
    if (!value) return false;
    PyTuple_SET_ITEM(inputs.get(), i, value.release());
  }
  if (PyDict_SetItemString(arguments.get(), "ctx", ctx) < 0 ||
      PyDict_SetItemString(arguments.get(), "inputs", inputs.get()) < 0) {
    return false;
  }
  if (plan.positional_count < total) {
    auto keywords = PyRef::steal(PyDict_New());
    for (int i = plan.positional_count; keywords && i < total; ++i) {
      auto value = value_of(plan, call, i);
      if (!value || PyDict_SetItem(keywords.get(), plan.arguments[i].name.get(), value.get()) < 0) {
        return false;
      }
    }
    if (!keywords ||
        PyDict_SetItemString(arguments.get(), "keyword_only_inputs", keywords.get()) < 0) {
      return false;
    }
  }
  if (PyDict_SetItemString(arguments.get(), "output", output) < 0) return false;
  auto none = PyRef::steal(PyTuple_New(0));
  auto setup = PyRef::borrow(plan.setup_context.get());
  return none && PyRef::steal(PyObject_Call(setup.get(), none.get(), arguments.get()));
}

// forward_recorded(ctx, *inputs, ...)
PyObject* forward_recorded(PyObject*, PyObject* args) {
  const Pending* mine = PyTuple_GET_SIZE(args) > 0 ? std::exchange(pending, nullptr) : nullptr;
  if (mine == nullptr) {
    PyErr_SetString(PyExc_RuntimeError,
                    "this forward belongs to hotop's call routine; call the op instead");
    return nullptr;
  }
  // PyTorch's forward runs setup_context below autograd as well.
  const BelowAutograd below(*mine->call.thread, true);
  auto output = PyRef::steal(mine->run());
  if (!output) return nullptr;
  if (mine->plan.setup_context &&
      !set_up(mine->plan, mine->call, PyTuple_GET_ITEM(args, 0), output.get())) {
    return nullptr;
  }
  return output.release();
}

}  // namespace

HOTOP_COLD PyObject* record_call(const Plan& plan, const Call& call, const Outgoing& outgoing,
                                 const std::function<PyObject*()>& run) {
  // One more input than the formula has, as in PyTorch, whose backward counts on it; an Ellipsis,
  // since a profiler would show a None.
  auto inputs = PyRef::steal(PyTuple_New(outgoing.positional + 1));
  if (!inputs) return nullptr;
  for (int i = 0; i < outgoing.positional; ++i) {
    Py_INCREF(outgoing.values[i]);
    PyTuple_SET_ITEM(inputs.get(), i, outgoing.values[i]);
  }
  Py_INCREF(Py_Ellipsis);
  PyTuple_SET_ITEM(inputs.get(), outgoing.positional, Py_Ellipsis);
  const Pending mine{plan, call, outgoing, run};
  auto record = PyRef::borrow(plan.record.get());
  // A finalizer may call an op before our forward begins.
  const Pending* before = std::exchange(pending, &mine);
  PyObject* result = PyObject_Call(record.get(), inputs.get(), nullptr);
  pending = before;
  return result;
}

PyMethodDef record_functions[] = {
    {"forward_recorded", forward_recorded, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
