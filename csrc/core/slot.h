// The base type of hotop's callables: a vectorcall pointer, the plan, and PyTorch's own entry.
#pragma once

#include <Python.h>

#include "plan.h"

namespace hotop {

struct Slot {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* plan;  // PlanObject, or null: always PyTorch's entry
  PyObject* slow;  // PyTorch's entry for this callable
};

// Cold part of every call that is not direct.
PyObject* call_pytorch(Slot* slot, PyObject* const* args, size_t nargsf, PyObject* kwnames);

bool is_slot(PyObject* object);  // else sets TypeError
bool add_slot_type(PyObject* module);
extern PyMethodDef slot_functions[];

}  // namespace hotop
