// The slot type: memory management, and pointing a Python class's call at the C++ routine.
#include "slot.h"

#include <cstddef>

#include "call.h"
#include "python_compat.h"

namespace hotop {

static_assert(offsetof(Slot, vectorcall) == sizeof(PyObject), "the pointer follows the header");
static_assert(sizeof(Slot) == sizeof(PyObject) + 3 * sizeof(void*), "three words, no padding");

namespace {

PyTypeObject* SlotType = nullptr;

PyObject* call_slow(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return call_pytorch(reinterpret_cast<Slot*>(self), args, nargsf, kwnames);
}

PyObject* slot_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* slot = reinterpret_cast<Slot*>(self);
  slot->vectorcall = call_slow;
  return self;
}

int slot_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  auto* slot = reinterpret_cast<Slot*>(self);
  Py_VISIT(slot->plan);
  Py_VISIT(slot->slow);
  return 0;
}

int slot_clear(PyObject* self) {
  auto* slot = reinterpret_cast<Slot*>(self);
  slot->vectorcall = call_slow;
  Py_CLEAR(slot->plan);
  Py_CLEAR(slot->slow);
  return 0;
}

void slot_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  slot_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slot_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(slot_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(slot_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(slot_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(slot_clear)},
    {0, nullptr},
};

PyType_Spec slot_spec = {"hotop._core.CallSlot", sizeof(Slot), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slot_slots};

// bind(slot, plan | None, slow): from now on calls go by the plan, and otherwise to `slow`.
PyObject* bind(PyObject*, PyObject* args) {
  PyObject* object = nullptr;
  PyObject* plan = nullptr;
  PyObject* slow = nullptr;
  if (!PyArg_ParseTuple(args, "OOO:bind", &object, &plan, &slow) || !is_slot(object)) {
    return nullptr;
  }
  if (plan != Py_None && !Py_IS_TYPE(plan, PlanType)) {
    PyErr_SetString(PyExc_TypeError, "expected a Plan or None");
    return nullptr;
  }
  slot_clear(object);
  auto* slot = reinterpret_cast<Slot*>(object);
  Py_INCREF(slow);
  slot->slow = slow;
  if (plan != Py_None) {
    Py_INCREF(plan);
    slot->plan = plan;
    slot->vectorcall = call_direct;
  }
  Py_RETURN_NONE;
}

// point_calls(cls): CPython calls instances of cls by their slot, whatever its __call__ says.
PyObject* point_calls(PyObject*, PyObject* object) {
  if (!PyType_Check(object) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(object), SlotType)) {
    PyErr_SetString(PyExc_TypeError, "expected a subclass of CallSlot");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  type->tp_vectorcall_offset = offsetof(Slot, vectorcall);
  type->tp_call = PyVectorcall_Call;
  type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  PyType_Modified(type);
  Py_RETURN_NONE;
}

}  // namespace

bool is_slot(PyObject* object) {
  if (PyObject_TypeCheck(object, SlotType)) return true;
  PyErr_SetString(PyExc_TypeError, "expected a CallSlot");
  return false;
}

HOTOP_COLD PyObject* call_pytorch(Slot* slot, PyObject* const* args, size_t nargsf,
                                  PyObject* kwnames) {
  if (slot->slow == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this op was called before it was defined");
    return nullptr;
  }
  auto slow = PyRef::borrow(slot->slow);
  return PyObject_Vectorcall(slow.get(), args, nargsf, kwnames);
}

bool add_slot_type(PyObject* module) {
  SlotType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&slot_spec));
  return SlotType != nullptr &&
         PyModule_AddObjectRef(module, "CallSlot", reinterpret_cast<PyObject*>(SlotType)) == 0;
}

PyMethodDef slot_functions[] = {
    {"bind", bind, METH_VARARGS, nullptr},
    {"point_calls", point_calls, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
