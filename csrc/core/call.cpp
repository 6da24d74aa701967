// The call routine: gate, version bump, kernel in its thread state, checks on the result.
#include "call.h"

#include <torch/csrc/Exceptions.h>

#include <exception>

#include "autocast.h"
#include "gate.h"
#include "observed.h"
#include "recorded.h"
#include "results.h"
#include "slot.h"
#include "torch_compat.h"

namespace hotop {

namespace {

// The kernel runs without the device contexts that led to it; afterwards they lie on top again.
class StashedModes {
 public:
  StashedModes() {
    for (int64_t left = at::impl::PythonTorchFunctionTLS::stack_len(); left > 0; --left) {
      modes_.push_back(at::impl::PythonTorchFunctionTLS::pop_stack());
    }
  }
  ~StashedModes() {
    for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) {
      at::impl::PythonTorchFunctionTLS::push_onto_stack(*mode);
    }
  }
  StashedModes(const StashedModes&) = delete;
  StashedModes& operator=(const StashedModes&) = delete;

 private:
  FunctionModes modes_;
};

// False with an error set when PyTorch does not allow the change.
bool bump_versions(const Plan& plan, const Call& call) try {
  any_tensor(plan, call, plan.mutated_positions, [](PyObject* tensor, int) {
    const at::Tensor& variable = THPVariable_Unpack(tensor);
    if (!variable.is_inference()) variable.unsafeGetTensorImpl()->bump_version();
    return false;
  });
  return true;
} catch (const std::exception&) {
  torch::translate_exception_to_python(std::current_exception());
  return false;
}

bool stands_for_default(const Argument& argument, PyObject* value) {
  return value == nullptr || (argument.default_value &&
                              equals_default(argument.kind, value, argument.default_value.get()));
}

// PyTorch drops trailing values that equal the schema's default before it calls a kernel.
HOTOP_INLINE int without_trailing_defaults(const Plan& plan, const Call& call) {
  int count = call.count < plan.positional_count ? call.count : plan.positional_count;
  while (count > 0 && plan.arguments[count - 1].default_value &&
         stands_for_default(plan.arguments[count - 1], call.values[count - 1])) {
    --count;
  }
  return count;
}

// Keyword-only values go behind the positional ones, those that equal a default left out.
PyRef pack_keywords(const Plan& plan, Call* call, int positional) {
  const int first = plan.positional_count;
  int kept = 0;
  for (int i = first; i < call->count; ++i) {
    kept += !stands_for_default(plan.arguments[i], call->values[i]);
  }
  if (kept == 0) return PyRef();
  auto names = PyRef::steal(PyTuple_New(kept));
  if (!names) return names;
  int place = 0;
  for (int i = first; i < call->count; ++i) {
    PyObject* value = call->buffer[1 + i];
    if (stands_for_default(plan.arguments[i], value)) continue;
    PyObject* name = plan.arguments[i].name.get();
    Py_INCREF(name);
    PyTuple_SET_ITEM(names.get(), place, name);
    call->buffer[1 + positional + place++] = value;
  }
  return names;
}

// The storages that an output may not have: those of the inputs, and of the outputs before it.
class TakenStorages {
 public:
  TakenStorages(const Plan& plan, const Call& call) : plan_(plan), call_(call) {}

  // False when the output aliases one of them, or when there are too many to keep here.
  HOTOP_INLINE bool add_output(PyObject* tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr) return true;
    if (HOTOP_LIKELY(count_ < 0)) {  // the first output needs no list
      count_ = 0;
      first_ = storage;
      return !any_tensor(plan_, call_, plan_.tensor_positions,
                         [storage](PyObject* input, int) { return storage_of(input) == storage; });
    }
    if (count_ == 0 && !collect()) return false;
    for (int i = 0; i < count_; ++i) {
      if (taken_[i] == storage) return false;
    }
    if (count_ == kMax) return false;
    taken_[count_++] = storage;
    return true;
  }

 private:
  static constexpr int kMax = 192;

  bool collect() {
    taken_[count_++] = first_;
    return !any_tensor(plan_, call_, plan_.tensor_positions, [this](PyObject* input, int) {
      if (count_ == kMax) return true;
      taken_[count_++] = storage_of(input);
      return false;
    });
  }

  const Plan& plan_;
  const Call& call_;
  int count_ = -1;  // -1: no output yet; 0: one output, inputs not collected
  const c10::StorageImpl* first_ = nullptr;
  const c10::StorageImpl* taken_[kMax];
};

// True when the value is exactly what PyTorch would hand on, and aliases nothing.
bool is_common_return(Kind kind, PyObject* value, TakenStorages* storages) {
  switch (kind) {
    case Kind::Tensor:
      return is_exact_tensor(value) && storages->add_output(value);
    case Kind::TensorList:
      // A list that somebody else holds must be copied.
      if (!PyList_CheckExact(value) || Py_REFCNT(value) != 1) return false;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        PyObject* element = PyList_GET_ITEM(value, i);
        if (!is_exact_tensor(element) || !storages->add_output(element)) return false;
      }
      return true;
    case Kind::Int:
    case Kind::Float:
    case Kind::Bool:
      return fits_as_is(kind, value);
    default:
      return false;
  }
}

// The same for a kernel that may alias what it likes.
bool is_common_unchecked(Kind kind, PyObject* value) {
  return kind == Kind::Tensor ? is_exact_tensor(value)
                              : (kind <= Kind::Bool && fits_as_is(kind, value));
}

// True when a result has the schema's shape and each of its values fits.
template <typename Fits>
HOTOP_INLINE bool every_return(const Plan& plan, PyObject* result, const Fits& fits) {
  if (plan.return_shape == ReturnShape::One) return fits(0, result);
  const size_t size = plan.return_kinds.size();
  if (!PyTuple_CheckExact(result)) return false;
  if (PyTuple_GET_SIZE(result) != static_cast<Py_ssize_t>(size)) return false;
  for (size_t i = 0; i < size; ++i) {
    if (!fits(i, PyTuple_GET_ITEM(result, i))) return false;
  }
  return true;
}

bool is_common_result(const Plan& plan, const Call& call, PyObject* result) {
  if (plan.return_shape == ReturnShape::None) return result == Py_None;
  switch (plan.obligation) {
    case Obligation::Inplace:
      return call.count > 0 && result == call.values[0];
    case Obligation::NoAlias: {
      TakenStorages storages(plan, call);
      return every_return(plan, result, [&](size_t i, PyObject* value) {
        return is_common_return(plan.return_kinds[i], value, &storages);
      });
    }
    case Obligation::Out:
      return every_return(plan, result, [&](size_t i, PyObject* value) {
        return value == call.values[plan.mutated_positions[i]];
      });
    case Obligation::Nothing:
      return every_return(plan, result, [&](size_t i, PyObject* value) {
        return is_common_unchecked(plan.return_kinds[i], value);
      });
    case Obligation::View:
      return false;
  }
  return false;
}

// A kernel that is not a Python function may lead back here.
HOTOP_COLD PyObject* call_other(PyObject* function, PyObject* const* args, size_t nargsf,
                                PyObject* keywords) {
  return call_counted(thread_state(), " while calling a kernel",
                      [&] { return PyObject_Vectorcall(function, args, nargsf, keywords); });
}

HOTOP_INLINE PyObject* call_kernel(PyObject* function, PyObject* const* args, size_t nargsf,
                                   PyObject* keywords) {
  if (HOTOP_LIKELY(PyFunction_Check(function))) {
    return PyObject_Vectorcall(function, args, nargsf, keywords);
  }
  return call_other(function, args, nargsf, keywords);
}

HOTOP_INLINE PyObject* run_kernel(Plan& plan, const Call& call, const Outgoing& outgoing,
                                  PyObject* of_kernel) {
  const auto function = PyRef::borrow(of_kernel);
  const size_t nargsf = outgoing.positional | outgoing.lent;
  BelowAutograd below(*call.thread, call.below_autograd);
  if (call.bumps_versions && !bump_versions(plan, call)) return nullptr;
  PyObject* result = call_kernel(function.get(), outgoing.values, nargsf, outgoing.keywords);
  if (HOTOP_UNLIKELY(result == nullptr)) return nullptr;
  if (HOTOP_LIKELY(is_common_result(plan, call, result))) return result;
  return finish_uncommon(plan, call.kernel, outgoing.values, outgoing.positional, outgoing.keywords,
                         result);
}

HOTOP_COLD PyObject* run_autocast(Slot* slot, const Call& call, const Outgoing& outgoing) {
  const auto again = [slot](PyObject* const* args, size_t nargsf) {
    return slot->vectorcall(reinterpret_cast<PyObject*>(slot), args, nargsf, nullptr);
  };
  return call_counted(*call.thread, " while calling an op under autocast",
                      [&] { return cast_and_call(call, outgoing.positional, again); });
}

HOTOP_INLINE PyObject* run_call(Slot* slot, Plan& plan, const Call& call, const Outgoing& outgoing,
                                PyObject* function) {
  if (HOTOP_UNLIKELY(call.casts)) return run_autocast(slot, call, outgoing);
  ++plan.direct_calls;
  // The kernel, setup_context and what else runs in the call.
  std::optional<StashedModes> without_modes;
  if (HOTOP_UNLIKELY(call.stash_modes)) without_modes.emplace();
  const auto run = [&] { return run_kernel(plan, call, outgoing, function); };
  return HOTOP_LIKELY(!call.records_grad) ? run() : record_call(plan, call, outgoing, run);
}

}  // namespace

PyObject* call_direct(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  auto* slot = reinterpret_cast<Slot*>(self);
  auto plan_alive = PyRef::borrow(slot->plan);  // the kernel may redefine the op
  Plan& plan = *reinterpret_cast<PlanObject*>(slot->plan)->plan;
  Call call;
  Verdict verdict;
  if (HOTOP_UNLIKELY(!prepare(plan, &call, args, PyVectorcall_NARGS(nargsf), kwnames, &verdict))) {
    return PyErr_Occurred() ? nullptr : call_pytorch(slot, args, nargsf, kwnames);
  }
  const int positional = without_trailing_defaults(plan, call);
  PyRef keywords;
  PyObject* const* values = call.values;
  PyObject* saved_values[kMaxArguments];
  if (HOTOP_UNLIKELY(call.count > plan.positional_count)) {
    // The kernel's argument vector is packed; the checks still need values by position.
    for (int i = 0; i < call.count; ++i) saved_values[i] = call.values[i];
    keywords = pack_keywords(plan, &call, positional);
    if (PyErr_Occurred()) return nullptr;
    call.values = saved_values;
    values = call.buffer + 1;
  }
  // The word in front of our own buffer is ours to lend; the caller's only if it lent it to us.
  const size_t lent = values == call.buffer + 1 ? PY_VECTORCALL_ARGUMENTS_OFFSET
                                                : nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET;
  const Outgoing outgoing{values, positional, lent, keywords.get()};
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (HOTOP_UNLIKELY(observers.has_value() && plan.entry->isObserved())) {
    // Observers run without the GIL: another thread may put another kernel into this one's place.
    const auto function = PyRef::borrow(call.kernel->function.get());
    return observe_call(plan, call, std::move(*observers),
                        [&] { return run_call(slot, plan, call, outgoing, function.get()); });
  }
  return run_call(slot, plan, call, outgoing, call.kernel->function.get());
}

}  // namespace hotop
