// PyTorch's per-thread state, found once per thread.
#include "thread_state.h"

namespace hotop {

constinit thread_local ThreadState this_thread{nullptr, nullptr, nullptr, 0};

HOTOP_COLD void find_thread_state(ThreadState* state) {
  state->function_modes = &at::impl::PythonTorchFunctionTLS::get_state();
  state->autograd = &c10::AutogradState::get_tls_state();
  state->dispatch_keys = &c10::impl::raw_local_dispatch_key_set;
}

}  // namespace hotop
