// The gate's verdict on a call, in words.
#pragma once

#include <Python.h>

namespace hotop {

extern PyMethodDef explain_functions[];

}  // namespace hotop
