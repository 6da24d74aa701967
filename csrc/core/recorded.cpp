// A direct call that autograd records. The node is PyTorch's own (PyNode with its ctx, so saved
// Tensors, hooks, names and compiled autograd are PyTorch's); what autograd.Function.apply does
// around a forward is done here, without its Python.
#include "recorded.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/profiler/api.h>

#include "record_outputs.h"
#include "torch_compat.h"

namespace hotop {

namespace {

// As around the forward of an autograd.Function.
class GradModesOff {
 public:
  explicit GradModesOff(const ThreadState& thread)
      : state_(*thread.autograd),
        grad_mode_(state_.get_grad_mode()),
        fw_grad_mode_(state_.get_fw_grad_mode()) {
    state_.set_grad_mode(false);
    state_.set_fw_grad_mode(false);
  }
  ~GradModesOff() {
    state_.set_grad_mode(grad_mode_);
    state_.set_fw_grad_mode(fw_grad_mode_);
  }
  GradModesOff(const GradModesOff&) = delete;
  GradModesOff& operator=(const GradModesOff&) = delete;

 private:
  c10::AutogradState& state_;
  bool grad_mode_;
  bool fw_grad_mode_;
};

// Values that equal a default were dropped, and are filled in from the schema.
PyRef value_of(const Plan& plan, const Call& call, int positional, int position) {
  const Argument& argument = plan.arguments[position];
  PyObject* value = position < call.count ? call.values[position] : nullptr;
  const bool dropped = position < plan.positional_count
                           ? position >= positional
                           : value == nullptr || (argument.default_value &&
                                                  equals_default(argument.kind, value,
                                                                 argument.default_value.get()));
  if (dropped) value = argument.default_value.get();
  return PyList_CheckExact(value) ? PyRef::steal(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)))
                                  : PyRef::borrow(value);
}

PyRef keyword_only_inputs(const Plan& plan, const Call& call, int positional) {
  auto inputs = PyRef::steal(PyDict_New());
  const int total = static_cast<int>(plan.arguments.size());
  for (int i = plan.positional_count; inputs && i < total; ++i) {
    auto value = value_of(plan, call, positional, i);
    if (!value || PyDict_SetItem(inputs.get(), plan.arguments[i].name.get(), value.get()) < 0) {
      return PyRef();
    }
  }
  return inputs;
}

// What setup_context(ctx=, inputs=, output=, [keyword_only_inputs=]) is called with, defaults
// filled in; made before the kernel runs, which may change the lists that it is given.
class SetupArguments {
 public:
  bool collect(const Plan& plan, const Call& call, int positional) {
    inputs_ = PyRef::steal(PyTuple_New(plan.positional_count));
    for (int i = 0; inputs_ && i < plan.positional_count; ++i) {
      auto value = value_of(plan, call, positional, i);
      if (!value) return false;
      PyTuple_SET_ITEM(inputs_.get(), i, value.release());
    }
    if (plan.positional_count == static_cast<int>(plan.arguments.size())) return !!inputs_;
    keywords_ = keyword_only_inputs(plan, call, positional);
    return inputs_ && keywords_;
  }

  explicit operator bool() const { return static_cast<bool>(inputs_); }

  bool call(PyObject* setup_context, PyObject* ctx, PyObject* output) const {
    static PyObject* const names = Py_BuildValue("(sss)", "ctx", "inputs", "output");
    static PyObject* const all_names =
        Py_BuildValue("(ssss)", "ctx", "inputs", "output", "keyword_only_inputs");
    if (names == nullptr || all_names == nullptr) return false;
    PyObject* const args[] = {nullptr, ctx, inputs_.get(), output, keywords_.get()};
    return static_cast<bool>(PyRef::steal(PyObject_Vectorcall(
        setup_context, args + 1, PY_VECTORCALL_ARGUMENTS_OFFSET, keywords_ ? all_names : names)));
  }

 private:
  PyRef inputs_;
  PyRef keywords_;
};

c10::TypePtr primitive_type(PyObject* value) {
  if (value == Py_None) return c10::NoneType::get();
  if (PyBool_Check(value)) return c10::BoolType::get();
  if (PyLong_Check(value)) return c10::IntType::get();
  if (PyFloat_Check(value)) return c10::FloatType::get();
  if (PyComplex_CheckExact(value)) return c10::ComplexType::get();
  if (!PyList_CheckExact(value) || PyList_GET_SIZE(value) == 0) return nullptr;
  const c10::TypePtr first = primitive_type(PyList_GET_ITEM(value, 0));
  for (Py_ssize_t i = 1; first && i < PyList_GET_SIZE(value); ++i) {
    const c10::TypePtr type = primitive_type(PyList_GET_ITEM(value, i));
    if (!type || *type != *first) return nullptr;
  }
  return first ? c10::ListType::create(first) : nullptr;
}

// What the event below shows of a call: Tensors, and for a profiler with shapes plain numbers too.
std::vector<c10::IValue> shown_inputs(const Plan& plan, const Outgoing& outgoing) {
  using namespace torch::profiler::impl;
  const bool numbers = profilerEnabled() && getProfilerConfig().report_input_shapes;
  std::vector<c10::IValue> inputs;
  for (int i = 0; i < outgoing.positional; ++i) {
    PyObject* value = outgoing.values[i];
    const Py_ssize_t count = plan.has_lists ? list_count(value) : -1;
    for (Py_ssize_t k = 0; k < count; ++k) {
      inputs.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(value, k)));
    }
    if (count >= 0) continue;
    if (is_tensor(value)) {
      inputs.emplace_back(THPVariable_Unpack(value));
    } else if (const c10::TypePtr type = numbers ? primitive_type(value) : nullptr) {
      inputs.push_back(torch::jit::toIValue(value, type));
    }
  }
  return inputs;
}

// The event that autograd.Function.apply records under the name of its class.
HOTOP_COLD void begin_event(at::RecordFunction& event, const Plan& plan, const Outgoing& outgoing) {
  std::string name = reinterpret_cast<PyTypeObject*>(plan.node_type.get())->tp_name;
  name.resize(name.size() - std::string_view("Backward").size());
  std::vector<c10::IValue> inputs;
  if (event.needsInputs()) inputs = shown_inputs(plan, outgoing);
  const auto number = static_cast<int64_t>(at::sequence_number::peek());
  event.before(std::move(name), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()),
               number);
}

PyObject* record(const Plan& plan, const Call& call, const Outgoing& outgoing,
                 const std::function<PyObject*()>& run) {
  std::optional<at::RecordFunction> event;
  if (auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
      HOTOP_UNLIKELY(observers.has_value())) {
    event.emplace(std::move(*observers));
    begin_event(*event, plan, outgoing);
  }
  auto node_type = PyRef::borrow(plan.node_type.get());
  auto ctx_object = PyRef::steal(new_node(node_type.get()));
  if (!ctx_object) return nullptr;
  auto* ctx = reinterpret_cast<THPFunction*>(ctx_object.get());
  const RecordedInputs inputs(plan, outgoing.values, outgoing.positional, ctx);
  if (!inputs.tell(plan, ctx)) return nullptr;
  SetupArguments arguments;
  if (plan.setup_context && !arguments.collect(plan, call, outgoing.positional)) return nullptr;
  PyRef output;
  {
    const GradModesOff grad_modes(*call.thread);
    // PyTorch's forward runs setup_context below autograd as well.
    const BelowAutograd below(*call.thread, true);
    output = PyRef::steal(run());
    if (!output) return nullptr;
    // The kernel may have registered another formula.
    if (auto setup_context = PyRef::borrow(plan.setup_context.get())) {
      if (!arguments && !arguments.collect(plan, call, outgoing.positional)) return nullptr;
      if (!arguments.call(setup_context.get(), ctx_object.get(), output.get())) return nullptr;
    }
  }
  return record_outputs(plan, inputs, ctx, std::move(output));
}

}  // namespace

PyObject* record_call(const Plan& plan, const Call& call, const Outgoing& outgoing,
                      const std::function<PyObject*()>& run) try {
  return record(plan, call, outgoing, run);
} catch (const std::exception&) {
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

}  // namespace hotop
