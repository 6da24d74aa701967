// The call routine of every hotop callable.
#pragma once

#include <Python.h>

namespace hotop {

PyObject* call_direct(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames);

}  // namespace hotop
