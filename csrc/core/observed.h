// A direct call under a profiler or another RecordFunction observer.
#pragma once

#include <ATen/record_function.h>
#include <Python.h>

#include <functional>

#include "gate.h"

namespace hotop {

// Runs the kernel inside the event that PyTorch's dispatcher would record for this call.
PyObject* observe_call(const Plan& plan, const Call& call, at::StepCallbacks&& observers,
                       const std::function<PyObject*()>& run);

}  // namespace hotop
