// The Tunable type as Python sees it: making one, its table, its counters.
#include "tunable.h"

#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include <cstddef>
#include <memory>

#include "tactics.h"

namespace hotop {

namespace {

constexpr int kMaxTactics = 64;

PyObject* tunable_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* object = type->tp_alloc(type, 0);
  if (object != nullptr) reinterpret_cast<Tunable*>(object)->vectorcall = call_tunable;
  return object;
}

bool read_rules(PyObject* list, std::vector<BucketRule>* rules) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    BucketRule rule;
    int kind = 0;
    long long dimension = 0;
    long long cap = -1;
    PyObject* sizes = nullptr;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "LiLO!", &dimension, &kind, &cap, &PyTuple_Type,
                          &sizes)) {
      return false;
    }
    rule.dimension = dimension;
    rule.kind = static_cast<BucketRule::Kind>(kind);
    rule.cap = cap;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(sizes); ++j) {
      rule.sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, j)));
      if (PyErr_Occurred()) return false;
    }
    if (kind < 0 || kind > BucketRule::Left ||
        (rule.kind == BucketRule::Listed && rule.sizes.empty())) {
      PyErr_SetString(PyExc_ValueError, "not a bucket rule");
      return false;
    }
    rules->push_back(std::move(rule));
  }
  return true;
}

// Tunable(parameters, choice_parameter, default): parameters as (name, required, default, ignored,
// mutated, rules), rules as (dimension, kind, cap, sizes).
int tunable_init(PyObject* object, PyObject* args, PyObject*) {
  auto* self = reinterpret_cast<Tunable*>(object);
  PyObject* parameters = nullptr;
  PyObject* function = nullptr;
  auto tactics = std::make_unique<Tactics>();
  if (!PyArg_ParseTuple(args, "O!iO", &PyList_Type, &parameters, &tactics->choice_parameter,
                        &function)) {
    return -1;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); ++i) {
    PyObject* name = nullptr;
    PyObject* default_value = nullptr;
    PyObject* rules = nullptr;
    int required = 0;
    int ignored = 0;
    int mutated = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(parameters, i), "UpOppO!", &name, &required,
                          &default_value, &ignored, &mutated, &PyList_Type, &rules)) {
      return -1;
    }
    KeyedParameter parameter;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    parameter.name = PyRef::steal(name);
    if (!required) parameter.default_value = PyRef::borrow(default_value);
    parameter.ignored = ignored != 0;
    parameter.mutated = mutated != 0;
    tactics->mutates |= parameter.mutated;
    if (!read_rules(rules, &parameter.rules)) return -1;
    tactics->parameters.push_back(std::move(parameter));
  }
  tactics->functions.push_back(PyRef::borrow(function));
  tactics->objects = PyRef::steal(PyDict_New());
  if (!tactics->objects) return -1;
  // A call may be running on the old ones.
  if (self->tactics != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this tunable was made already");
    return -1;
  }
  self->tactics = tactics.release();
  return 0;
}

int tunable_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Tunable*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->dict);
  if (self->tactics != nullptr) {
    for (const auto& parameter : self->tactics->parameters) Py_VISIT(parameter.default_value.get());
    for (const auto& function : self->tactics->functions) Py_VISIT(function.get());
    Py_VISIT(self->tactics->objects.get());
    for (const auto& known : self->tactics->allowed) Py_VISIT(known.second.first.get());
  }
  return 0;
}

int tunable_clear(PyObject* object) {
  auto* self = reinterpret_cast<Tunable*>(object);
  Py_CLEAR(self->dict);
  delete std::exchange(self->tactics, nullptr);
  return 0;
}

void tunable_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (reinterpret_cast<Tunable*>(object)->weakrefs != nullptr) PyObject_ClearWeakRefs(object);
  tunable_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

Tactics* tactics_of(PyObject* object) {
  auto* tactics = reinterpret_cast<Tunable*>(object)->tactics;
  if (tactics == nullptr) PyErr_SetString(PyExc_RuntimeError, "this tunable was not made");
  return tactics;
}

PyObject* add_tactic(PyObject* object, PyObject* function) {
  Tactics* tactics = tactics_of(object);
  if (tactics == nullptr) return nullptr;
  if (tactics->functions.size() == kMaxTactics) {
    PyErr_Format(PyExc_ValueError, "at most %d tactics", kMaxTactics);
    return nullptr;
  }
  tactics->functions.push_back(PyRef::borrow(function));
  // What a text allows was parsed without it.
  tactics->last_text = nullptr;
  auto old = std::exchange(tactics->allowed, {});
  Py_RETURN_NONE;
}

// _key_words(args, kwargs) -> bytes, or None when the call cannot be tuned.
PyObject* key_words(PyObject* object, PyObject* arguments) {
  PyObject* positional = nullptr;
  PyObject* keywords = nullptr;
  if (tactics_of(object) == nullptr ||
      !PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &positional, &PyDict_Type, &keywords)) {
    return nullptr;
  }
  std::vector<PyObject*> values;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positional); ++i) {
    values.push_back(PyTuple_GET_ITEM(positional, i));
  }
  auto names = PyRef::steal(PyTuple_New(PyDict_GET_SIZE(keywords)));
  if (!names) return nullptr;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t at = 0;
  for (Py_ssize_t i = 0; PyDict_Next(keywords, &at, &name, &value); ++i) {
    if (!PyUnicode_Check(name)) {
      PyErr_SetString(PyExc_TypeError, "keywords must be strings");
      return nullptr;
    }
    values.push_back(value);
    Py_INCREF(name);
    PyTuple_SET_ITEM(names.get(), i, name);
  }
  Key key;
  uint64_t allowed = 0;
  switch (key_of_call(reinterpret_cast<Tunable*>(object), values.data(),
                      PyTuple_GET_SIZE(positional), names.get(), &key, &allowed)) {
    case Keyed::Error:
      return nullptr;
    case Keyed::No:
      Py_RETURN_NONE;
    case Keyed::Yes:
      break;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key.words),
                                   key.count * static_cast<Py_ssize_t>(sizeof(uint64_t)));
}

bool read_key(PyObject* object, Key* key) {
  Py_buffer words;
  if (PyObject_GetBuffer(object, &words, PyBUF_SIMPLE) < 0) return false;
  const auto size = static_cast<size_t>(words.len);
  const bool fits = size % sizeof(uint64_t) == 0 && size > 0 && size <= sizeof key->words;
  if (fits) {
    std::memcpy(key->words, words.buf, size);
    key->count = static_cast<int>(size / sizeof(uint64_t));
  } else {
    PyErr_SetString(PyExc_ValueError, "not a key");
  }
  PyBuffer_Release(&words);
  return fits;
}

// _set_choice(words, tactic, ask=False): this tactic won for this key; with `ask`, `_asked` says
// whether it serves a call.
PyObject* set_choice(PyObject* object, PyObject* arguments) {
  Tactics* tactics = tactics_of(object);
  PyObject* words = nullptr;
  int tactic = 0;
  int ask = 0;
  Key key;
  if (tactics == nullptr || !PyArg_ParseTuple(arguments, "Oi|p", &words, &tactic, &ask) ||
      !read_key(words, &key)) {
    return nullptr;
  }
  if (tactic < 0 || static_cast<size_t>(tactic) >= tactics->functions.size()) {
    PyErr_SetString(PyExc_ValueError, "not a tactic of this tunable");
    return nullptr;
  }
  tactics->table.set(key, static_cast<uint8_t>(tactic), true, ask != 0);
  Py_RETURN_NONE;
}

PyObject* choice_count(PyObject* object, PyObject*) {
  const Tactics* tactics = tactics_of(object);
  return tactics == nullptr ? nullptr : PyLong_FromSize_t(tactics->table.tuned_count());
}

PyObject* clear_choices(PyObject* object, PyObject*) {
  Tactics* tactics = tactics_of(object);
  if (tactics == nullptr) return nullptr;
  tactics->table.clear();
  tactics->loaded_devices = 0;
  tactics->hits = tactics->misses = 0;
  Py_RETURN_NONE;
}

// _mark_loaded(device): from now on a miss on this device type is only counted.
PyObject* mark_loaded(PyObject* object, PyObject* device) {
  Tactics* tactics = tactics_of(object);
  if (tactics == nullptr) return nullptr;
  if (!THPDevice_Check(device)) {
    PyErr_SetString(PyExc_TypeError, "expected a torch.device");
    return nullptr;
  }
  const auto type = reinterpret_cast<THPDevice*>(device)->device.type();
  tactics->loaded_devices |= uint64_t{1} << (static_cast<int>(type) & 63);
  Py_RETURN_NONE;
}

PyObject* object_number(PyObject* object, PyObject* value) {
  Tactics* tactics = tactics_of(object);
  if (tactics == nullptr) return nullptr;
  Key key;
  if (add_object(*tactics, &key, value) != Keyed::Yes) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "this value cannot be part of a key");
    return nullptr;
  }
  return PyLong_FromUnsignedLongLong(key.words[0] >> 8);
}

template <int64_t Tactics::* Count>
PyObject* get_count(PyObject* object, void*) {
  const auto* tactics = reinterpret_cast<Tunable*>(object)->tactics;
  return PyLong_FromLongLong(tactics == nullptr ? 0 : tactics->*Count);
}

PyMethodDef methods[] = {
    {"_add_tactic", add_tactic, METH_O, nullptr},
    {"_key_words", key_words, METH_VARARGS, nullptr},
    {"_set_choice", set_choice, METH_VARARGS, nullptr},
    {"_choice_count", choice_count, METH_NOARGS, nullptr},
    {"_clear_choices", clear_choices, METH_NOARGS, nullptr},
    {"_mark_loaded", mark_loaded, METH_O, nullptr},
    {"_object_number", object_number, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"hits", get_count<&Tactics::hits>, nullptr, "Calls that a tuned choice served.", nullptr},
    {"misses", get_count<&Tactics::misses>, nullptr, "Calls without a tuned choice.", nullptr},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Tunable, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Tunable, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Tunable, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tunable_new)},
    {Py_tp_init, reinterpret_cast<void*>(tunable_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tunable_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tunable_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tunable_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "hotop._core.Tunable", sizeof(Tunable), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    slots};

PyObject* set_tuning(PyObject*, PyObject* active) {
  tuning = active == Py_True;
  Py_RETURN_NONE;
}

PyObject* set_timing_tactics(PyObject*, PyObject* active) {
  timing_tactics = active == Py_True;
  Py_RETURN_NONE;
}

// use_vectorcall(cls): CPython 3.11 does not hand the flag on to a class made in Python.
PyObject* use_vectorcall(PyObject*, PyObject* object) {
  if (!PyType_Check(object) || reinterpret_cast<PyTypeObject*>(object)->tp_vectorcall_offset !=
                                   offsetof(Tunable, vectorcall)) {
    PyErr_SetString(PyExc_TypeError, "expected a subclass of Tunable");
    return nullptr;
  }
  reinterpret_cast<PyTypeObject*>(object)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  PyType_Modified(reinterpret_cast<PyTypeObject*>(object));
  Py_RETURN_NONE;
}

// tensor_word(dtype, dimensions, packed, aligned, parameter, device): a Tensor's first word, for a
// key from a file.
PyObject* make_tensor_word(PyObject*, PyObject* arguments) {
  PyObject* dtype = nullptr;
  PyObject* device = nullptr;
  int dimensions = 0;
  int packed = 0;
  int aligned = 0;
  int parameter = 0;
  if (!PyArg_ParseTuple(arguments, "O!ipppO!", &THPDtypeType, &dtype, &dimensions, &packed,
                        &aligned, &parameter, &THPDeviceType, &device)) {
    return nullptr;
  }
  const auto where = reinterpret_cast<THPDevice*>(device)->device;
  return PyLong_FromUnsignedLongLong(tensor_word(
      static_cast<int>(reinterpret_cast<THPDtype*>(dtype)->scalar_type), dimensions, packed != 0,
      aligned != 0, parameter != 0, static_cast<int>(where.type()), where.index()));
}

}  // namespace

bool add_tunable_type(PyObject* module) {
  auto type = PyRef::steal(PyType_FromSpec(&spec));
  return type && PyModule_AddObjectRef(module, "Tunable", type.get()) == 0;
}

PyMethodDef tunable_functions[] = {
    {"set_tuning", set_tuning, METH_O, nullptr},
    {"set_timing_tactics", set_timing_tactics, METH_O, nullptr},
    {"use_vectorcall", use_vectorcall, METH_O, nullptr},
    {"tensor_word", make_tensor_word, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
