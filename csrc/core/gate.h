// The gate: binds a call's values and proves, or fails to prove, that one known kernel would run.
#pragma once

#include <Python.h>

#include "plan.h"
#include "thread_state.h"
#include "values.h"

namespace hotop {

// Why a call is PyTorch's. The texts are in explain.cpp.
enum class Reason : uint8_t {
  Direct,
  NoPlan,
  ArgumentCount,
  UnknownKeyword,
  RepeatedArgument,
  MissingArgument,
  Value,
  RequiresGrad,
  Tangent,
  DispatchKey,
  BackendSelect,
  Autocast,
  FunctionMode,
  DynamoCallback,
};

struct Verdict {
  Reason reason = Reason::Direct;
  int position = -1;                                   // of the argument, where one is to blame
  c10::DispatchKey key = c10::DispatchKey::Undefined;  // where the walk left the known road
};

// One call on its way. Lives on the C stack; values are borrowed unless listed in `owned`. The plan
// must outlive it.
struct Call {
  Plan* plan;
  PyObject* const* values;  // by schema position; null: not given
  int count;                // positions [0, count) are present in `values`
  bool stash_modes;         // device contexts are active: the kernel runs without them
  bool records_grad;        // an input requires grad and grad mode is on
  int owned_count;
  ThreadState* thread;
  // Of the route, which Python code that runs in between may make the plan forget.
  bool below_autograd;
  bool bumps_versions;
  bool casts;
  Kernel* kernel;
  c10::DispatchKeySet keys;
  PyObject* owned[kMaxArguments];
  uint8_t owned_for[kMaxArguments];     // the argument that each was made for
  PyObject* buffer[kMaxArguments + 1];  // one spare word in front, as the vectorcall protocol likes

  Call() : count(0), stash_modes(false), records_grad(false), owned_count(0) {}
  ~Call() {
    while (HOTOP_UNLIKELY(owned_count > 0)) {
      --owned_count;
      give_back(plan->arguments[owned_for[owned_count]], owned[owned_count]);
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // At most once per argument, so `owned` has a place for each.
  void replace(int position, PyObject* fresh) {
    owned_for[owned_count] = static_cast<uint8_t>(position);
    owned[owned_count++] = fresh;
    own_buffer();
    buffer[1 + position] = fresh;
  }

  // From here on `values` may be written to.
  void own_buffer() {
    if (values == buffer + 1) return;
    for (int i = 0; i < count; ++i) buffer[1 + i] = values[i];
    values = buffer + 1;
  }
};

// Calls visit(tensor, position) for every Tensor that stands in one of these arguments, list
// elements included, until it returns true.
template <typename Visit>
HOTOP_INLINE bool any_tensor(const Plan& plan, const Call& call,
                             const std::vector<uint8_t>& positions, Visit visit) {
  for (const int position : positions) {
    if (position >= call.count) break;
    PyObject* value = call.values[position];
    if (value == nullptr || value == Py_None) continue;
    if (HOTOP_LIKELY(plan.arguments[position].kind == Kind::Tensor)) {
      if (visit(value, position)) return true;
      continue;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      PyObject* element = PyList_GET_ITEM(value, i);
      if (is_tensor(element) && visit(element, position)) return true;
    }
  }
  return false;
}

// Puts values into their schema positions in `values`, a place for each argument, null where none
// is given. Returns how many leading positions may be filled; -1: a keyword does not fit.
int bind_keywords(const Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                  PyObject** values, Verdict* verdict);

// True: call `call->kernel`. False: PyTorch's call, or an error when PyErr_Occurred().
bool prepare(Plan& plan, Call* call, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
             Verdict* verdict);

// The Python objects that the gate compares against; taken from torch at import.
bool load_gate_objects();

}  // namespace hotop
