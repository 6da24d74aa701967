// The autograd node of a recorded call: PyTorch's, with a backward that enters the formula from
// C++.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_function.h>

#include "plan.h"
#include "values.h"

namespace hotop {

// A node of this class, still without inputs, outputs and edges. Null: an error is set.
PyObject* new_node(PyObject* node_type);

// What PyTorch takes apart as several inputs or outputs is a list of nothing but Tensors: its
// length; -1 for any other value.
Py_ssize_t list_count(PyObject* value);
using ListCounts = c10::SmallVector<Py_ssize_t, 8>;

// Tells the backward, in ctx._pt_metadata where PyTorch keeps it too, how lists were taken apart.
bool keep_structure(THPFunction* ctx, const ListCounts& inputs, const ListCounts& outputs);

extern PyMethodDef node_functions[];

}  // namespace hotop
