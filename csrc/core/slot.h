// The base type of hotop's callables: a vectorcall pointer, the plan, and PyTorch's own entry.
#pragma once

#include <Python.h>

#include "plan.h"

namespace hotop {

struct Slot {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* plan;  // PlanObject, a tuple of slots to choose from, a function that makes the plan
                   // in the first call, or null: always PyTorch's entry
  PyObject* slow;  // PyTorch's entry for this callable
};

// Every call that is not direct: by the boxed rung, or else by PyTorch's own entry.
PyObject* call_pytorch(Slot* slot, PyObject* const* args, size_t nargsf, PyObject* kwnames);

// What a slot points to whose calls are never direct.
PyObject* call_slow(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames);

// The slot of a packet with several overloads for one call: that of the first overload, in
// PyTorch's order, that can take so many arguments and these keywords. Its plan is null when there
// is none.
Slot resolved_slot(const Slot& packet, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);

// Writes a keyword dict's values to `values` and returns their names, as the vectorcall protocol
// has them. Null: an error is set.
PyRef unpack_keywords(PyObject* kwargs, PyObject** values);

bool is_slot(PyObject* object);  // else sets TypeError
bool add_slot_type(PyObject* module);
extern PyMethodDef slot_functions[];

}  // namespace hotop
