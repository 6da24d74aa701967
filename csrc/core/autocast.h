// A call that an autocast rule of the op takes up first.
#pragma once

#include <Python.h>

#include <functional>

#include "gate.h"

namespace hotop {

// Casts the floating-point Tensors among the inputs as the rule says, and calls the op again with
// autocast off for the device: again(arguments, count).
PyObject* cast_and_call(const Call& call, int positional,
                        const std::function<PyObject*(PyObject* const*, size_t)>& again);

}  // namespace hotop
