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
  c10::AutogradState* autograd;
  int depth;  // of calls that go through C only
};

extern constinit thread_local ThreadState this_thread;

void find_thread_state(ThreadState* state);

HOTOP_INLINE ThreadState& thread_state() {
  ThreadState& state = this_thread;
  if (HOTOP_UNLIKELY(state.dispatch_keys == nullptr)) find_thread_state(&state);
  return state;
}

// Counts a call that has no Python frame. Since 3.12 CPython counts such calls apart, up to 10,000,
// which is more than the stack holds. Not entered: RecursionError is set.
class CountedCall {
 public:
  CountedCall(ThreadState& thread, const char* where) : thread_(thread) {
    if (++thread_.depth < Py_GetRecursionLimit() && thread_.depth < kMost) {
      entered_ = Py_EnterRecursiveCall(where) == 0;
    } else {
      PyErr_Format(PyExc_RecursionError, "maximum recursion depth exceeded%s", where);
    }
  }
  ~CountedCall() {
    if (entered_) Py_LeaveRecursiveCall();
    --thread_.depth;
  }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;
  bool entered() const { return entered_; }

 private:
  static constexpr int kMost = 1000;
  ThreadState& thread_;
  bool entered_ = false;
};

// Autograd is excluded while the kernel runs. Like PyTorch's layers, this puts the whole excluded
// set back, also what the kernel changed in it.
class BelowAutograd {
 public:
  BelowAutograd(const ThreadState& thread, bool active)
      : keys_(active ? thread.dispatch_keys : nullptr) {
    if (HOTOP_UNLIKELY(keys_ == nullptr)) return;
    saved_ = keys_->excluded();
    keys_->set_excluded(saved_ | c10::autograd_dispatch_keyset);
  }
  ~BelowAutograd() {
    if (HOTOP_LIKELY(keys_ != nullptr)) keys_->set_excluded(saved_);
  }
  BelowAutograd(const BelowAutograd&) = delete;
  BelowAutograd& operator=(const BelowAutograd&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet* keys_;
  c10::DispatchKeySet saved_;
};

}  // namespace hotop
