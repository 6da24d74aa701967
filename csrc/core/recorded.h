// A direct call that autograd records.
#pragma once

#include <Python.h>

#include <functional>

#include "gate.h"

namespace hotop {

// What a kernel is called with.
struct Outgoing {
  PyObject* const* values;
  int positional;
  size_t lent;  // PY_VECTORCALL_ARGUMENTS_OFFSET or 0
  PyObject* keywords;
};

// Runs the kernel and makes the node of its result.
PyObject* record_call(const Plan& plan, const Call& call, const Outgoing& outgoing,
                      const std::function<PyObject*()>& run);

}  // namespace hotop
