// The boxed rung: a call's arguments converted by its plan, then one boxed call of the dispatcher.
#pragma once

#include "plan.h"

namespace hotop {

// Makes the call when every value has a form that the plan knows; `*result` is null when it raised.
// False: nothing has happened, and PyTorch's own entry has to look at the call.
bool call_boxed(Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                PyObject** result);

// True when call_boxed would make the call.
bool can_call_boxed(Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);

bool load_boxed_objects();

}  // namespace hotop
