// The event of an op's call, recorded around a direct call as the dispatcher records it.
#include "observed.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <optional>
#include <vector>

namespace hotop {

namespace {

// An error that is set now is put back at the end. Observers may run Python.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~KeptError() { PyErr_Restore(type_, value_, traceback_); }
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

// All arguments of the schema as the dispatcher would hold them, defaults included. Empty when a
// value has no such form; then the event has no inputs.
std::vector<c10::IValue> boxed_inputs(const Plan& plan, const Call& call) {
  const auto& arguments = plan.schema->arguments();
  std::vector<c10::IValue> inputs;
  inputs.reserve(arguments.size());
  try {
    for (size_t i = 0; i < arguments.size(); ++i) {
      PyObject* value = static_cast<int>(i) < call.count ? call.values[i] : nullptr;
      inputs.push_back(value != nullptr ? torch::jit::toIValue(value, arguments[i].real_type())
                                        : arguments[i].default_value().value());
    }
  } catch (const std::exception&) {
    PyErr_Clear();
    inputs.clear();
  }
  return inputs;
}

std::vector<c10::IValue> boxed_outputs(const Plan& plan, PyObject* result) {
  const auto& types = plan.return_types;
  std::vector<c10::IValue> outputs;
  try {
    if (types.size() == 1) {
      outputs.push_back(torch::jit::toIValue(result, types[0]));
    } else if (PyTuple_Check(result)) {
      for (size_t i = 0; i < types.size(); ++i) {
        outputs.push_back(torch::jit::toIValue(PyTuple_GetItem(result, i), types[i]));
      }
    }
  } catch (const std::exception&) {
    PyErr_Clear();
    outputs.clear();
  }
  return outputs;
}

// The dispatcher's rule: the number ties a forward event to the backward node to come.
int64_t sequence_number(const Call& call) {
  const bool below_autograd = call.keys.has_any(c10::autograd_dispatch_keyset);
  return below_autograd && call.thread->autograd->get_grad_mode() ? at::sequence_number::peek()
                                                                  : -1;
}

}  // namespace

HOTOP_COLD PyObject* observe_call(const Plan& plan, const Call& call, at::StepCallbacks&& observers,
                                  const std::function<PyObject*()>& run) {
  const auto schema = plan.schema;  // the kernel may remove the op; the event's end needs its name
  at::RecordFunction event(std::move(observers));
  std::vector<c10::IValue> inputs;
  if (event.needsInputs()) inputs = boxed_inputs(plan, call);
  const int64_t number = sequence_number(call);
  {
    // The dispatcher runs observers without the GIL too.
    py::gil_scoped_release no_gil;
    if (event.needsInputs()) {
      event.before(std::cref(*schema),
                   c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()), number);
    } else {
      event.before(std::cref(*schema), number);
    }
  }
  PyObject* result = run();
  if (result != nullptr && event.needsOutputs()) event.setOutputs(boxed_outputs(plan, result));
  KeptError error;
  inputs.clear();
  py::gil_scoped_release no_gil;
  event.end();
  return result;
}

}  // namespace hotop
