// The Tunable type: a callable that picks one of its tactics by the shapes and values of a call.
#pragma once

#include <Python.h>

namespace hotop {

bool add_tunable_type(PyObject* module);

extern PyMethodDef tunable_functions[];

}  // namespace hotop
