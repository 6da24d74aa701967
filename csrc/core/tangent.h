// A guard around the autograd kernel: forward-mode tangents are refused, not dropped.
#pragma once

#include <Python.h>

namespace hotop {

extern PyMethodDef tangent_functions[];

}  // namespace hotop
