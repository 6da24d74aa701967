// Attribute look-ups on torch.ops, its namespaces and packets, without Python's __getattr__ detour.
#pragma once

#include <Python.h>

namespace hotop {

extern PyMethodDef lookup_functions[];

}  // namespace hotop
