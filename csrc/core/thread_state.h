// PyTorch's per-thread state, found once per thread: each look-up through another library's
// thread_local costs 8 ns, and a call needs four.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "python_compat.h"

namespace hotop {

struct ThreadState {
  c10::impl::PODLocalDispatchKeySet* dispatch_keys;
  const at::impl::PythonTorchFunctionTLS* function_modes;
  const c10::AutogradState* autograd;
};

extern constinit thread_local ThreadState this_thread;

void find_thread_state(ThreadState* state);

HOTOP_INLINE ThreadState& thread_state() {
  ThreadState& state = this_thread;
  if (HOTOP_UNLIKELY(state.dispatch_keys == nullptr)) find_thread_state(&state);
  return state;
}

}  // namespace hotop
