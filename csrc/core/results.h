// What a kernel returned: the checks and conversions that PyTorch makes, off the common road.
#pragma once

#include <Python.h>

#include "plan.h"

namespace hotop {

// Takes over `result`. Returns what PyTorch would return to the caller, or null with its error.
PyObject* finish_uncommon(Plan& plan, Kernel* kernel, PyObject* const* args, Py_ssize_t nargs,
                          PyObject* kwnames, PyObject* result);

// The same without PyTorch's check on aliases: types and conversions only.
PyObject* convert_result(const Plan& plan, PyObject* result);

}  // namespace hotop
