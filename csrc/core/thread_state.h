// PyTorch's per-thread state, found once per thread: each look-up through another library's
// thread_local costs 8 ns, and a call needs four.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "python_compat.h"

namespace hotop {

struct ThreadState {
  c10::impl::PODLocalDispatchKeySet* dispatch_keys;
  const at::impl::PythonTorchFunctionTLS* function_modes;
  const c10::AutogradState* autograd;
  bool observed;  // an observer was seen; ask the slow, complete question until it is gone
};

extern constinit thread_local ThreadState this_thread;

void find_thread_state(ThreadState* state);

HOTOP_INLINE ThreadState& thread_state() {
  ThreadState& state = this_thread;
  if (HOTOP_UNLIKELY(state.dispatch_keys == nullptr)) find_thread_state(&state);
  return state;
}

// True when a RecordFunction observer, such as a profiler, may want this call.
// at::hasCallbacks() takes a lock and copies; the dispatcher's own question does not, but it draws
// a sample for observers that see only some calls. So it is asked only while none is there.
HOTOP_INLINE bool is_observed(ThreadState& state) {
  if (HOTOP_UNLIKELY(state.observed)) {
    state.observed = at::hasCallbacks();
  } else if (HOTOP_UNLIKELY(
                 at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value())) {
    state.observed = true;
  }
  return state.observed;
}

}  // namespace hotop
