// The gate: binds a call's values and proves, or fails to prove, that one known kernel would run.
#include "gate.h"

#include <torch/csrc/PyInterpreter.h>

#include "node.h"
#include "python_compat.h"
#include "python_kernel.h"
#include "thread_state.h"
#include "torch_compat.h"

namespace hotop {

namespace {

PyInterpreterState* interpreter = nullptr;
PyObject* device_context_type = nullptr;  // torch.utils._device.DeviceContext
// torch._C._dynamo.eval_frame.get_eval_frame_callback; its C function is called without CPython's
// calling machinery, because every call inside a compiled program asks.
PyObject* get_frame_callback = nullptr;

HOTOP_COLD bool refuse(Verdict* verdict, Reason reason, int position = -1) {
  verdict->reason = reason;
  verdict->position = position;
  return false;
}

// Gaps that keywords left: a default in the middle is passed, as PyTorch does.
bool fill_gaps(const Plan& plan, Call* call, Verdict* verdict) {
  const int total = static_cast<int>(plan.arguments.size());
  for (int i = 0; i < total; ++i) {
    if (call->buffer[1 + i] != nullptr) continue;
    const Argument& argument = plan.arguments[i];
    if (!argument.default_value) return refuse(verdict, Reason::MissingArgument, i);
    if (i >= call->count || i >= plan.positional_count) continue;
    // A default that is a list is copied like any list, later.
    call->buffer[1 + i] = argument.default_value.get();
  }
  return true;
}

bool check_tail(Plan& plan, Call* call, int position, TensorFacts* facts, Verdict* verdict) {
  for (const int count = call->count; position < count; ++position) {
    PyObject* value = call->values[position];
    if (value == nullptr) continue;
    Argument& argument = plan.arguments[position];
    if (value == Py_None && argument.optional) continue;
    if (argument.kind == Kind::Tensor) {
      if (HOTOP_UNLIKELY(!is_exact_tensor(value))) return refuse(verdict, Reason::Value, position);
      facts->add(value);
      continue;
    }
    const bool list = is_list(argument.kind);
    if (!list && HOTOP_LIKELY(fits_as_is(argument.kind, value))) continue;
    const Fit fit = list ? fit_list(argument, &value, facts) : fit_scalar(argument.kind, &value);
    if (fit == Fit::AsIs) continue;
    if (fit == Fit::Replaced) {
      call->replace(position, value);
      continue;
    }
    return refuse(verdict, Reason::Value, position);
  }
  return true;
}

struct GradFacts {
  int requires_grad = -1;  // position of the first such argument
  int tangent = -1;
};

HOTOP_COLD GradFacts grad_facts(const Plan& plan, const Call& call) {
  GradFacts facts;
  // PyTorch's layer asks the positional arguments only, but all of them for an out= op, and never a
  // list with a None.
  const int end = plan.obligation == Obligation::Out ? kMaxArguments : plan.positional_count;
  const auto is_asked = [&](int position) {
    return position < end && (plan.arguments[position].kind != Kind::OptionalTensorList ||
                              list_count(call.values[position]) >= 0);
  };
  any_tensor(plan, call, plan.tensor_positions, [&](PyObject* tensor, int position) {
    const auto* meta = impl_of(tensor)->autograd_meta();
    if (meta == nullptr) return false;
    if (facts.requires_grad < 0 && meta->requires_grad() && is_asked(position)) {
      facts.requires_grad = position;
    }
    if (facts.tangent < 0 && has_tangent(meta)) facts.tangent = position;
    return false;
  });
  return facts;
}

// PyTorch's classes for a formula are made when they are first needed.
HOTOP_COLD bool make_record(Plan& plan) {
  auto make = std::move(plan.make_formula);
  if (!make) return false;
  if (!PyRef::steal(PyObject_CallNoArgs(make.get()))) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {  // Ctrl-C comes only once
      if (!plan.make_formula) plan.make_formula = std::move(make);
      return false;
    }
    PyErr_Clear();  // PyTorch's call will raise it
  }
  return plan.live && plan.node_type;
}

HOTOP_INLINE bool still_stands(const Route& route) {
  for (int i = 0; i < route.station_count; ++i) {
    if (kernel_functor(*route.stations[i].entry).get() != route.stations[i].expected) return false;
  }
  return HOTOP_LIKELY(!route.passes_fallback) || is_autograd_fallback(*route.stations[0].entry);
}

// That kernel has work when an input requires grad, wherever it stands.
HOTOP_COLD int needs_fallback(const Plan& plan, const Call& call) {
  if (!call.thread->autograd->get_grad_mode()) return -1;
  int found = -1;
  any_tensor(plan, call, plan.tensor_positions, [&](PyObject* tensor, int position) {
    const auto* meta = impl_of(tensor)->autograd_meta();
    if (meta == nullptr || !meta->requires_grad()) return false;
    found = position;
    return true;
  });
  return found;
}

HOTOP_INLINE const Route* known_route(Plan& plan, uint64_t keys) {
  for (Route& route : plan.routes) {
    if (route.keys == keys && route.station_count > 0) return &route;
  }
  return nullptr;
}

// PyTorch's BackendSelect reads the device among the positional arguments, where a keyword-only one
// or one that equals its default is not found; then the error is PyTorch's to raise.
HOTOP_COLD Kernel* selected_kernel(Plan& plan, const Call& call) {
  const int position = plan.device_position;
  if (position < 0 || position >= call.count || position >= plan.positional_count) return nullptr;
  PyObject* device = call.values[position];
  if (device == nullptr || !Py_IS_TYPE(device, &THPDeviceType)) return nullptr;
  PyObject* usual = plan.arguments[position].default_value.get();
  if (usual != nullptr && equals_default(Kind::Device, device, usual)) return nullptr;
  return kernel_for_device(plan, device);
}

// Device contexts only pass calls on; a mode is off inside its own handler, so the kernel runs
// without them.
HOTOP_COLD bool only_device_contexts(const FunctionModes& modes) {
  for (const auto& mode : modes) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(mode->ptr(getPyInterpreter())));
    if (type != device_context_type) return false;
  }
  return true;
}

// The evaluator stays replaced while compiled code runs or another thread compiles; the callback is
// this thread's own.
bool thread_has_frame_callback() {
  auto callback = PyRef::steal(PyCFunction_GET_FUNCTION(get_frame_callback)(
      PyCFunction_GET_SELF(get_frame_callback), nullptr));
  if (!callback) PyErr_Clear();
  return callback.get() != Py_None;
}

}  // namespace

int bind_keywords(const Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                  PyObject** values, Verdict* verdict) {
  const int total = static_cast<int>(plan.arguments.size());
  int end = static_cast<int>(nargs);
  // Interned names match by pointer.
  for (int i = 0; i < end; ++i) values[i] = args[i];
  for (int i = end; i < total; ++i) values[i] = nullptr;
  const Py_ssize_t keyword_count = PyTuple_GET_SIZE(kwnames);
  int guess = end;  // keywords mostly come in the order of the schema
  for (Py_ssize_t k = 0; k < keyword_count; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    int position = -1;
    for (int step = 0, i = guess < total ? guess : 0; step < total; ++step) {
      if (plan.arguments[i].name.get() == name) {
        position = i;
        break;
      }
      if (++i == total) i = 0;
    }
    for (int i = 0; position < 0 && i < total; ++i) {
      if (PyUnicode_Compare(plan.arguments[i].name.get(), name) == 0) position = i;
    }
    if (HOTOP_UNLIKELY(position < 0)) {
      refuse(verdict, Reason::UnknownKeyword);
      return -1;
    }
    if (HOTOP_UNLIKELY(values[position] != nullptr)) {
      refuse(verdict, Reason::RepeatedArgument, position);
      return -1;
    }
    values[position] = args[nargs + k];
    guess = position + 1;
    if (guess > end) end = guess;
  }
  return end;
}

bool prepare(Plan& plan, Call* call, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
             Verdict* verdict) {
  call->plan = &plan;
  if (HOTOP_UNLIKELY(!plan.live)) return refuse(verdict, Reason::NoPlan);
  if (HOTOP_LIKELY(kwnames == nullptr)) {
    if (HOTOP_UNLIKELY(nargs < plan.required_count || nargs > plan.positional_count)) {
      return refuse(verdict, Reason::ArgumentCount);
    }
    call->values = args;
    call->count = static_cast<int>(nargs);
  } else {
    if (nargs > plan.positional_count) return refuse(verdict, Reason::ArgumentCount);
    const int count = bind_keywords(plan, args, nargs, kwnames, call->buffer + 1, verdict);
    if (count < 0) return false;
    call->values = call->buffer + 1;
    call->count = count;
    if (!fill_gaps(plan, call, verdict)) return false;
  }

  TensorFacts facts;
  const int plain = call->count < plan.plain_tensors ? call->count : plan.plain_tensors;
  for (int i = 0; i < plain; ++i) {
    PyObject* value = call->values[i];
    if (HOTOP_UNLIKELY(!is_exact_tensor(value))) return refuse(verdict, Reason::Value, i);
    facts.add(value);
  }
  if (plain < call->count && !check_tail(plan, call, plain, &facts, verdict)) return false;
  // A new list may have run the collector, and a finalizer may have removed the op.
  if (HOTOP_UNLIKELY(!plan.live)) return refuse(verdict, Reason::NoPlan);

  ThreadState& thread = thread_state();
  call->thread = &thread;
  const c10::DispatchKeySet keys = without_fallthrough(
      plan.entry->dispatchKeyExtractor(),
      (facts.keys | thread.dispatch_keys->included()) - thread.dispatch_keys->excluded());
  const Route* route = known_route(plan, keys.raw_repr());
  if (HOTOP_UNLIKELY(route == nullptr || !still_stands(*route))) {
    route = find_route(plan, keys, &verdict->key);
    if (route == nullptr) return refuse(verdict, Reason::DispatchKey);
  }
  call->below_autograd = route->below_autograd;
  call->bumps_versions = route->bumps_versions;
  call->casts = route->casts;
  call->keys = keys;
  call->kernel = route->kernel;
  if (HOTOP_UNLIKELY(route->passes_fallback && facts.any_autograd_meta)) {
    const int position = needs_fallback(plan, *call);
    if (position >= 0) return refuse(verdict, Reason::RequiresGrad, position);
  }
  if (HOTOP_UNLIKELY(route->selects_backend)) {
    call->kernel = selected_kernel(plan, *call);
    if (call->kernel == nullptr) return refuse(verdict, Reason::BackendSelect);
  }
  if (HOTOP_UNLIKELY(call->casts)) {
    // The second call, of Tensors of another dtype, must end in a kernel too.
    const c10::DispatchKeySet rest = keys.remove(call->kernel->cast_key);
    route = known_route(plan, rest.raw_repr());
    if ((route == nullptr || !still_stands(*route)) &&
        find_route(plan, rest, &verdict->key) == nullptr) {
      return refuse(verdict, Reason::DispatchKey);
    }
  }
  if (facts.any_autograd_meta && (call->below_autograd || call->casts)) {
    const GradFacts grad = grad_facts(plan, *call);
    if (grad.tangent >= 0 && thread.autograd->get_fw_grad_mode()) {
      return refuse(verdict, Reason::Tangent, grad.tangent);
    }
    if (grad.requires_grad >= 0 && thread.autograd->get_grad_mode()) {
      if (HOTOP_UNLIKELY(!plan.node_type) && !make_record(plan)) {
        return refuse(verdict, Reason::RequiresGrad, grad.requires_grad);
      }
      call->records_grad = !call->casts;
    }
  }
  const FunctionModes& modes = function_modes(*thread.function_modes);
  if (HOTOP_UNLIKELY(!modes.empty() && at::impl::torch_function_mode_enabled())) {
    if (!only_device_contexts(modes)) return refuse(verdict, Reason::FunctionMode);
    call->stash_modes = true;
  }
  // PyTorch's rule takes no keyword-only arguments, and its second call has rules of its own for
  // modes.
  if (HOTOP_UNLIKELY(call->casts) && (call->stash_modes || call->count > plan.positional_count)) {
    return refuse(verdict, Reason::Autocast);
  }
  if (HOTOP_UNLIKELY(frame_evaluator_replaced(interpreter)) && thread_has_frame_callback()) {
    return refuse(verdict, Reason::DynamoCallback);
  }
  return true;
}

bool load_gate_objects() {
  interpreter = PyInterpreterState_Get();
  auto device = PyRef::steal(PyImport_ImportModule("torch.utils._device"));
  auto dynamo = PyRef::steal(PyImport_ImportModule("torch._C._dynamo.eval_frame"));
  if (!device || !dynamo) return false;
  device_context_type = PyObject_GetAttrString(device.get(), "DeviceContext");
  get_frame_callback = PyObject_GetAttrString(dynamo.get(), "get_eval_frame_callback");
  if (device_context_type == nullptr || get_frame_callback == nullptr) return false;
  if (!PyCFunction_Check(get_frame_callback) ||
      PyCFunction_GET_FLAGS(get_frame_callback) != METH_NOARGS) {
    PyErr_SetString(PyExc_ImportError, "Dynamo's get_eval_frame_callback is not what hotop knows");
    return false;
  }
  return true;
}

}  // namespace hotop
