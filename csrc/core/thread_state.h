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

// Makes a call that has no Python frame for CPython to count. Since 3.12 CPython counts such calls
// apart, up to 10,000, which is more than the stack holds. No destructor gives the count back: at
// exit CPython unwinds daemon threads that have no thread state any more.
template <typename Action>
PyObject* call_counted(ThreadState& thread, const char* where, Action action) {
  constexpr int kMost = 1000;
  if (thread.depth >= kMost || thread.depth >= Py_GetRecursionLimit()) {
    PyErr_Format(PyExc_RecursionError, "maximum recursion depth exceeded%s", where);
    return nullptr;
  }
  if (Py_EnterRecursiveCall(where)) return nullptr;
  ++thread.depth;
  PyObject* result = action();
  --thread.depth;
  Py_LeaveRecursiveCall();
  return result;
}

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
