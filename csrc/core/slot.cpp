// The slot type: memory management, and pointing a Python class's call at the C++ routine.
#include "slot.h"

#include <algorithm>
#include <cstddef>

#include "boxed.h"
#include "call.h"
#include "gate.h"
#include "python_compat.h"

namespace hotop {

static_assert(offsetof(Slot, vectorcall) == sizeof(PyObject), "the pointer follows the header");
static_assert(sizeof(Slot) == sizeof(PyObject) + 3 * sizeof(void*), "three words, no padding");

PyObject* call_slow(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return call_pytorch(reinterpret_cast<Slot*>(self), args, nargsf, kwnames);
}

namespace {

// False: PyTorch would refuse the call for this overload, whatever the values are.
bool may_take(const Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (nargs > plan.positional_count) return false;
  if (kwnames == nullptr) return nargs >= plan.required_count;
  PyObject* bound[kMaxArguments];
  Verdict verdict;
  if (bind_keywords(plan, args, nargs, kwnames, bound, &verdict) < 0) return false;
  for (int i = 0; i < plan.required_count; ++i) {
    if (bound[i] == nullptr && !plan.arguments[i].default_value) return false;
  }
  return true;
}

// True when PyTorch's conversion of a value to this type may enter a Tensor: for its number, or to
// iterate over it.
bool may_enter_tensor(const Argument& argument, PyObject* value) {
  switch (argument.kind) {
    case Kind::Tensor:
    case Kind::Scalar:
    case Kind::Str:
    case Kind::Device:
      return false;
    default:
      break;
  }
  if (is_tensor(value)) return true;
  if (argument.kind == Kind::TensorList || argument.kind == Kind::OptionalTensorList) return false;
  if (!PyList_Check(value) && !PyTuple_Check(value)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
    if (is_tensor(PySequence_Fast_GET_ITEM(value, i))) return true;
  }
  return false;
}

// True when PyTorch may enter a Tensor before it refuses the call for this overload: kernels run,
// and an error of theirs ends the whole call.
bool refusal_is_seen(const Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const Py_ssize_t keywords = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  if (nargs + keywords > static_cast<Py_ssize_t>(plan.arguments.size())) return false;
  for (Py_ssize_t i = 0; i < std::min<Py_ssize_t>(nargs, plan.positional_count); ++i) {
    if (may_enter_tensor(plan.arguments[i], args[i])) return true;
  }
  for (Py_ssize_t k = 0; k < keywords; ++k) {
    for (const Argument& argument : plan.arguments) {
      if (may_enter_tensor(argument, args[nargs + k]) &&
          PyUnicode_Compare(argument.name.get(), PyTuple_GET_ITEM(kwnames, k)) == 0) {
        return true;
      }
    }
  }
  return false;
}

PyObject* call_resolved(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const auto slots_alive = PyRef::borrow(reinterpret_cast<Slot*>(self)->plan);
  Slot chosen =
      resolved_slot(*reinterpret_cast<Slot*>(self), args, PyVectorcall_NARGS(nargsf), kwnames);
  const auto plan_alive = PyRef::borrow(chosen.plan);
  const auto slow_alive = PyRef::borrow(chosen.slow);
  return chosen.vectorcall(reinterpret_cast<PyObject*>(&chosen), args, nargsf, kwnames);
}

PyTypeObject* SlotType = nullptr;
PyObject* slot_name = nullptr;
Py_hash_t slot_name_hash = 0;

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

// A slot of bind_later has, where others have a plan, the function that makes the plan and binds
// the slot. It has returned when the call is made, by the road of every later one: tracers,
// profilers and tracebacks find no frame of hotop's. Calls meanwhile, and those that it failed for,
// are PyTorch's.
PyObject* call_first(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  auto* slot = reinterpret_cast<Slot*>(self);
  const auto make = PyRef::borrow(slot->plan);
  slot->vectorcall = call_slow;
  const auto made = PyRef::steal(PyObject_CallNoArgs(make.get()));
  if (!made) {
    if (slot->plan == make.get()) slot->vectorcall = call_first;  // the next call tries again
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  const auto call = slot->vectorcall == call_first ? call_slow : slot->vectorcall;
  return call(self, args, nargsf, kwnames);
}

void put(Slot* slot, vectorcallfunc vectorcall, PyObject* plan, PyObject* slow) {
  slot->vectorcall = vectorcall;
  // What stood there goes last: that may run Python code.
  const auto old_plan = PyRef::steal(std::exchange(slot->plan, PyRef::borrow(plan).release()));
  const auto old_slow = PyRef::steal(std::exchange(slot->slow, PyRef::borrow(slow).release()));
}

// bind(slot, plan | slots | None, slow, may_be_direct=True): from now on calls go by the plan, or
// by that of one of the slots, and otherwise to `slow`. An operator whose kernels are in C++ is
// never called directly.
PyObject* bind(PyObject*, PyObject* args) {
  PyObject* object = nullptr;
  PyObject* plan = nullptr;
  PyObject* slow = nullptr;
  int may_be_direct = 1;
  if (!PyArg_ParseTuple(args, "OOO|p:bind", &object, &plan, &slow, &may_be_direct) ||
      !is_slot(object)) {
    return nullptr;
  }
  const bool several = PyTuple_CheckExact(plan);
  bool known = plan == Py_None || several || Py_IS_TYPE(plan, PlanType);
  for (Py_ssize_t i = 0; several && known && i < PyTuple_GET_SIZE(plan); ++i) {
    known = PyObject_TypeCheck(PyTuple_GET_ITEM(plan, i), SlotType);
  }
  if (!known) {
    PyErr_SetString(PyExc_TypeError, "expected a Plan, a tuple of slots, or None");
    return nullptr;
  }
  const bool planned = plan != Py_None;
  const auto vectorcall = !planned || (!several && !may_be_direct) ? call_slow
                          : several                                ? call_resolved
                                                                   : call_direct;
  put(reinterpret_cast<Slot*>(object), vectorcall, planned ? plan : nullptr, slow);
  Py_RETURN_NONE;
}

// bind_later(slot, make, slow): the first call calls make(), which binds the slot.
PyObject* bind_later(PyObject*, PyObject* args) {
  PyObject* object = nullptr;
  PyObject* make = nullptr;
  PyObject* slow = nullptr;
  if (!PyArg_ParseTuple(args, "OOO:bind_later", &object, &make, &slow) || !is_slot(object)) {
    return nullptr;
  }
  put(reinterpret_cast<Slot*>(object), call_first, make, slow);
  Py_RETURN_NONE;
}

// The slot of an object whose layout is PyTorch's, from its dict; borrowed.
HOTOP_INLINE PyObject* slot_in_dict(PyObject* self) {
  PyObject** dict = _PyObject_GetDictPtr(self);
  if (dict == nullptr || *dict == nullptr) return nullptr;
  return _PyDict_GetItem_KnownHash(*dict, slot_name, slot_name_hash);
}

// tp_call of such objects. Without a slot it is the __call__ that the class has in Python.
PyObject* call_by_dict(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto found = PyRef::borrow(slot_in_dict(self));
  if (HOTOP_UNLIKELY(!found || !PyObject_TypeCheck(found.get(), SlotType))) {
    auto slow = PyRef::steal(PyObject_GetAttrString(self, "__call__"));
    return slow ? PyObject_Call(slow.get(), args, kwargs) : nullptr;
  }
  auto* slot = reinterpret_cast<Slot*>(found.get());
  const Py_ssize_t nargs = PyTuple_GET_SIZE(args);
  PyObject* const* values = &PyTuple_GET_ITEM(args, 0);
  const Py_ssize_t nkeywords = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs);
  if (HOTOP_LIKELY(nkeywords == 0)) {
    return slot->vectorcall(found.get(), values, nargs, nullptr);
  }
  if (nargs + nkeywords > kMaxArguments) {
    auto slow = slot->slow != nullptr ? PyRef::borrow(slot->slow)
                                      : PyRef::steal(PyObject_GetAttrString(self, "__call__"));
    return slow ? PyObject_Call(slow.get(), args, kwargs) : nullptr;
  }
  PyObject* all[kMaxArguments];
  for (Py_ssize_t i = 0; i < nargs; ++i) all[i] = values[i];
  auto names = unpack_keywords(kwargs, all + nargs);
  if (!names) return nullptr;
  return slot->vectorcall(found.get(), all, nargs, names.get());
}

// point_calls_by_dict(cls): the same for a class of objects whose layout is PyTorch's: their slot
// is what their dict has under SLOT_NAME.
PyObject* point_calls_by_dict(PyObject*, PyObject* object) {
  if (!PyType_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "expected a class");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  type->tp_call = call_by_dict;
  PyType_Modified(type);
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

Slot resolved_slot(const Slot& packet, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Slot chosen = packet;
  chosen.vectorcall = call_slow;
  chosen.plan = nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(packet.plan); ++i) {
    const auto* slot = reinterpret_cast<Slot*>(PyTuple_GET_ITEM(packet.plan, i));
    if (slot->plan == nullptr || !Py_IS_TYPE(slot->plan, PlanType)) break;
    const Plan& plan = *reinterpret_cast<PlanObject*>(slot->plan)->plan;
    if (!plan.registered) break;
    if (!may_take(plan, args, nargs, kwnames)) {
      if (refusal_is_seen(plan, args, nargs, kwnames)) break;
      continue;
    }
    chosen.vectorcall = slot->vectorcall;
    chosen.plan = slot->plan;
    break;
  }
  return chosen;
}

PyRef unpack_keywords(PyObject* kwargs, PyObject** values) {
  auto names = PyRef::steal(PyTuple_New(PyDict_GET_SIZE(kwargs)));
  if (!names) return names;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0, i = 0; PyDict_Next(kwargs, &at, &name, &value); ++i) {
    if (HOTOP_UNLIKELY(!PyUnicode_Check(name))) {
      PyErr_SetString(PyExc_TypeError, "keywords must be strings");
      return PyRef();
    }
    Py_INCREF(name);
    PyTuple_SET_ITEM(names.get(), i, name);
    values[i] = value;
  }
  return names;
}

bool is_slot(PyObject* object) {
  if (PyObject_TypeCheck(object, SlotType)) return true;
  PyErr_SetString(PyExc_TypeError, "expected a CallSlot");
  return false;
}

PyObject* call_pytorch(Slot* slot, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (slot->slow == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this op was called before it was defined");
    return nullptr;
  }
  // Python code that ran in the gate may have bound the slot to something else.
  if (slot->plan != nullptr && Py_IS_TYPE(slot->plan, PlanType)) {
    auto plan_alive = PyRef::borrow(slot->plan);
    Plan& plan = *reinterpret_cast<PlanObject*>(slot->plan)->plan;
    PyObject* result = nullptr;
    if (call_boxed(plan, args, PyVectorcall_NARGS(nargsf), kwnames, &result)) return result;
    ++plan.pytorch_calls;
  }
  auto slow = PyRef::borrow(slot->slow);
  return PyObject_Vectorcall(slow.get(), args, nargsf, kwnames);
}

bool add_slot_type(PyObject* module) {
  SlotType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&slot_spec));
  slot_name = PyUnicode_InternFromString("_hotop_slot");
  slot_name_hash = slot_name == nullptr ? -1 : PyObject_Hash(slot_name);
  return SlotType != nullptr && slot_name_hash != -1 &&
         PyModule_AddObjectRef(module, "SLOT_NAME", slot_name) == 0 &&
         PyModule_AddObjectRef(module, "CallSlot", reinterpret_cast<PyObject*>(SlotType)) == 0;
}

PyMethodDef slot_functions[] = {
    {"bind", bind, METH_VARARGS, nullptr},
    {"bind_later", bind_later, METH_VARARGS, nullptr},
    {"point_calls", point_calls, METH_O, nullptr},
    {"point_calls_by_dict", point_calls_by_dict, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
