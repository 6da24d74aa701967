// A guard around the autograd kernel: it is made when first needed, and forward-mode tangents are
// refused, not dropped.
#pragma once

#include <Python.h>

namespace hotop {

extern PyMethodDef autograd_functions[];

}  // namespace hotop
