// Forward-mode tangents on a call's arguments, for the autograd kernel written in Python.
#pragma once

#include <Python.h>

namespace hotop {

extern PyMethodDef tangent_functions[];

}  // namespace hotop
