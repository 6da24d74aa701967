// What a call of a tunable does: key, one probe of the table, tactic.
#include "tactics.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>

#include "thread_state.h"
#include "tuning_memory.h"
#include "values.h"

namespace hotop {

bool tuning = false;
thread_local bool timing_tactics = false;

namespace {

constexpr Py_ssize_t kMaxObjects = 1 << 12;

}  // namespace

Keyed add_object(Tactics& tactics, Key* key, PyObject* value) {
  if (!PyUnicode_CheckExact(value) && !THPDevice_Check(value) && !THPLayout_Check(value) &&
      !THPMemoryFormat_Check(value)) {
    return Keyed::No;
  }
  PyObject* number = PyDict_GetItemWithError(tactics.objects.get(), value);
  if (number == nullptr) {
    if (PyErr_Occurred()) return Keyed::Error;
    const Py_ssize_t count = PyDict_GET_SIZE(tactics.objects.get());
    if (count >= kMaxObjects) return Keyed::No;
    auto fresh = PyRef::steal(PyLong_FromSsize_t(count));
    if (!fresh || PyDict_SetItem(tactics.objects.get(), value, fresh.get()) < 0) {
      return Keyed::Error;
    }
    number = fresh.get();
  }
  key->add(tagged(KeyTag::Object, PyLong_AsUnsignedLongLong(number)));
  return Keyed::Yes;
}

namespace {

constexpr size_t kMaxRememberedDefaults = 1 << 16;
constexpr size_t kMaxTexts = 1 << 12;

// Tensors whose meaning or memory is not what sizes and dtype say. Not for a tactic that reads
// memory, and their sizes may throw or run Python. `_key` names the same keys.
constexpr c10::DispatchKeySet kOpaque({
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor,
    c10::DispatchKey::NestedTensor,
    c10::DispatchKey::Quantized,
    c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchBatched,
});

HOTOP_INLINE Keyed add_tensor(const KeyedParameter& parameter, Key* key, Touched* touched,
                              PyObject* value) {
  const c10::TensorImpl* impl = THPVariable_Unpack(value).unsafeGetTensorImpl();
  if (HOTOP_UNLIKELY(impl->key_set().has_any(kOpaque) || impl->has_symbolic_sizes_strides() ||
                     impl->layout() != c10::kStrided)) {
    return Keyed::No;
  }
  key->any_autograd_meta |= impl->autograd_meta() != nullptr;
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  const auto device = impl->device();
  const int dimensions = static_cast<int>(sizes.size());
  if (key->device_type <= 0) key->device_type = static_cast<int>(device.type());
  if (HOTOP_UNLIKELY(dimensions >= Key::kMaxWords - key->count || dimensions > 64)) {
    key->too_long = true;
    return Keyed::No;
  }
  uint64_t* const words = key->words + key->count + 1;
  int64_t dense = 1;
  bool packed = true;
  for (int i = dimensions; --i >= 0;) {
    words[i] = static_cast<uint64_t>(sizes[i]);
    packed &= strides[i] == dense;
    dense *= sizes[i] == 0 ? 1 : sizes[i];
  }
  uintptr_t address = 0;
  if (HOTOP_LIKELY(impl->has_storage())) {
    address = reinterpret_cast<uintptr_t>(impl->unsafe_storage().data());
    if (HOTOP_LIKELY(address != 0)) {
      address += static_cast<uintptr_t>(impl->storage_offset()) * impl->itemsize();
    }
  }
  key->words[key->count] = tensor_word(
      static_cast<int>(c10::typeMetaToScalarType(impl->dtype())), dimensions, packed,
      address % 16 == 0, !Py_IS_TYPE(value, reinterpret_cast<PyTypeObject*>(THPVariableClass)),
      static_cast<int>(device.type()), device.index());
  key->count += dimensions + 1;
  for (const BucketRule& rule : parameter.rules) {
    const int64_t at = rule.dimension < 0 ? rule.dimension + dimensions : rule.dimension;
    if (at < 0 || at >= dimensions) continue;
    words[at] = rule.kind == BucketRule::Left ? ~uint64_t{0}
                                              : static_cast<uint64_t>(rule.bucket(sizes[at]));
  }
  if (HOTOP_UNLIKELY(!packed)) add_strides(key, impl);
  if (HOTOP_UNLIKELY(touched != nullptr)) touched->add(impl, address, parameter.mutated);
  return Keyed::Yes;
}

Keyed add_value(Tactics& tactics, const KeyedParameter& parameter, Key* key, Touched* touched,
                PyObject* value) {
  if (HOTOP_LIKELY(is_exact_tensor(value))) return add_tensor(parameter, key, touched, value);
  if (value == Py_None) {
    key->add(tagged(KeyTag::None));
  } else if (PyBool_Check(value)) {
    key->add(tagged(KeyTag::Bool, value == Py_True));
  } else if (PyLong_CheckExact(value)) {
    if (!fits_int64(value)) return Keyed::No;
    key->add(tagged(KeyTag::Int));
    key->add(static_cast<uint64_t>(PyLong_AsLongLong(value)));
  } else if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    key->add(tagged(KeyTag::Float));
    key->add(bits);
  } else if (THPDtype_Check(value)) {
    const auto type = reinterpret_cast<THPDtype*>(value)->scalar_type;
    key->add(tagged(KeyTag::Dtype, static_cast<uint64_t>(type)));
  } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value) || THPSize_Check(value)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    key->add(list_word(size, PyList_CheckExact(value) ? 0 : PyTuple_CheckExact(value) ? 1 : 2));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* element = PySequence_Fast_GET_ITEM(value, i);
      if (PyList_Check(element) || PyTuple_Check(element)) return Keyed::No;
      const Keyed keyed = add_value(tactics, parameter, key, touched, element);
      if (keyed != Keyed::Yes || key->too_long) return keyed == Keyed::Error ? keyed : Keyed::No;
    }
  } else if (PyUnicode_CheckExact(value)) {
    return add_object(tactics, key, value);
  } else {
    return add_object(tactics, key, value);
  }
  return Keyed::Yes;
}

// A str is parsed by Python once per object.
HOTOP_COLD Keyed parse_allowed(Tunable* self, PyObject* text, uint64_t* allowed) {
  Tactics& tactics = *self->tactics;
  auto known = tactics.allowed.find(text);
  if (known == tactics.allowed.end()) {
    const size_t tactic_count = tactics.functions.size();
    auto mask = PyRef::steal(
        PyObject_CallMethod(reinterpret_cast<PyObject*>(self), "_parse_allowed", "O", text));
    if (!mask) return Keyed::Error;
    const uint64_t bits = PyLong_AsUnsignedLongLong(mask.get());
    if (PyErr_Occurred()) return Keyed::Error;
    if (tactics.functions.size() != tactic_count) {
      // A tactic came meanwhile: the answer holds for this call only.
      *allowed = bits;
      return Keyed::Yes;
    }
    if (tactics.allowed.size() >= kMaxTexts) {
      tactics.last_text = nullptr;
      // A finalizer must not find the map half empty.
      auto old = std::exchange(tactics.allowed, {});
    }
    known = tactics.allowed.emplace(text, std::make_pair(PyRef::borrow(text), bits)).first;
  }
  *allowed = known->second.second;
  tactics.last_text = text;
  tactics.last_allowed = *allowed;
  return Keyed::Yes;
}

HOTOP_COLD PyObject* find_keyword(PyObject* const* values, PyObject* kwnames, PyObject* name) {
  const Py_ssize_t count = PyTuple_GET_SIZE(kwnames);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyTuple_GET_ITEM(kwnames, i) == name) return values[i];
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, i), name) == 0) return values[i];
  }
  return nullptr;
}

// A tunable is a kernel. Called above autograd with a Tensor that requires grad it takes the
// default: another tactic could lose the gradient without a word.
HOTOP_COLD bool records_grad(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const auto& thread = thread_state();
  if (!thread.autograd->get_grad_mode() ||
      thread.dispatch_keys->excluded().has_all(c10::autograd_dispatch_keyset)) {
    return false;
  }
  const auto requires_grad = [](PyObject* value) {
    return is_tensor(value) && THPVariable_Unpack(value).requires_grad();
  };
  const Py_ssize_t count = nargs + (kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (requires_grad(args[i])) return true;
    if (!PyList_CheckExact(args[i]) && !PyTuple_CheckExact(args[i])) continue;
    for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(args[i]); ++j) {
      if (requires_grad(PySequence_Fast_GET_ITEM(args[i], j))) return true;
    }
  }
  return false;
}

// `No`: this call cannot be tuned, or it is malformed and the default tactic will say so.
HOTOP_INLINE Keyed make_key(Tunable* self, PyObject* const* args, Py_ssize_t nargs,
                            PyObject* kwnames, Key* key, uint64_t* allowed) {
  Tactics& tactics = *self->tactics;
  const auto count = static_cast<Py_ssize_t>(tactics.parameters.size());
  *allowed = tactics.choice_parameter < 0 ? ~uint64_t{0} : 0;
  if (nargs > count) return Keyed::No;
  Py_ssize_t keywords_left = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  key->add(list_word(count, 0));
  Touched touched;
  Touched* const watched = HOTOP_UNLIKELY(tactics.mutates) ? &touched : nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const KeyedParameter& parameter = tactics.parameters[i];
    PyObject* value = i < nargs ? args[i] : nullptr;
    if (HOTOP_UNLIKELY(value == nullptr)) {
      if (keywords_left > 0) value = find_keyword(args + nargs, kwnames, parameter.name.get());
      if (value != nullptr) {
        --keywords_left;
      } else {
        value = parameter.default_value.get();
        if (value == nullptr) return Keyed::No;
      }
    }
    if (parameter.ignored) continue;
    if (i == tactics.choice_parameter) {
      if (HOTOP_LIKELY(value == tactics.last_text)) {
        *allowed = tactics.last_allowed;
      } else {
        const Keyed parsed = parse_allowed(self, value, allowed);
        if (parsed != Keyed::Yes) return parsed;
      }
      key->add(tagged(KeyTag::Allowed));
      key->add(*allowed);
      continue;
    }
    const Keyed keyed = add_value(tactics, parameter, key, watched, value);
    if (HOTOP_UNLIKELY(keyed != Keyed::Yes)) return keyed;
  }
  if (HOTOP_UNLIKELY(watched != nullptr)) {
    if (touched.too_many) return Keyed::No;
    touched.close(key);
  }
  if (HOTOP_UNLIKELY(key->any_autograd_meta) && records_grad(args, nargs, kwnames)) {
    return Keyed::No;
  }
  // A keyword that is left is unknown, or repeats a positional value.
  return key->too_long || keywords_left > 0 ? Keyed::No : Keyed::Yes;
}

PyRef pack_positional(PyObject* const* args, Py_ssize_t nargs) {
  auto packed = PyRef::steal(PyTuple_New(nargs));
  for (Py_ssize_t i = 0; packed && i < nargs; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(packed.get(), i, args[i]);
  }
  return packed;
}

PyRef pack_keywords(PyObject* const* values, PyObject* kwnames) {
  auto packed = PyRef::steal(PyDict_New());
  const Py_ssize_t count = packed && kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyDict_SetItem(packed.get(), PyTuple_GET_ITEM(kwnames, i), values[i]) < 0) return PyRef();
  }
  return packed;
}

// self.<name>(args, kwargs)
HOTOP_COLD PyRef ask_python(Tunable* self, const char* name, PyObject* const* args,
                            Py_ssize_t nargs, PyObject* kwnames) {
  auto positional = pack_positional(args, nargs);
  auto keywords = pack_keywords(args + nargs, kwnames);
  if (!positional || !keywords) return PyRef();
  return PyRef::steal(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), name, "OO",
                                          positional.get(), keywords.get()));
}

// The number of the tactic for a call whose choice has to be asked whether it applies; -1 with an
// error set.
HOTOP_COLD int asked(Tunable* self, int tactic, PyObject* const* args, Py_ssize_t nargs,
                     PyObject* kwnames) {
  auto positional = pack_positional(args, nargs);
  auto keywords = pack_keywords(args + nargs, kwnames);
  if (!positional || !keywords) return -1;
  auto answer = PyRef::steal(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), "_asked", "iOO",
                                                 tactic, positional.get(), keywords.get()));
  if (!answer) return -1;
  const long found = PyLong_AsLong(answer.get());
  if (found == -1 && PyErr_Occurred()) return -1;
  ++(found == tactic ? self->tactics->hits : self->tactics->misses);
  return static_cast<int>(found);
}

// The number of the tactic for a call that the table does not know; -1 with an error set.
HOTOP_COLD int miss(Tunable* self, const Key& key, bool keyed, uint64_t allowed,
                    PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Tactics& tactics = *self->tactics;
  // A call without Tensors has no device, so no file and no choice.
  const bool loaded =
      key.device_type < 0 || (tactics.loaded_devices >> (key.device_type & 63) & 1) != 0;
  if ((allowed & 1) != 0 && (loaded || !keyed)) {
    ++tactics.misses;
    return 0;
  }
  auto answer = ask_python(self, "_missed", args, nargs, kwnames);
  if (!answer) return -1;
  const long tactic = PyLong_AsLong(answer.get());
  if (tactic == -1 && PyErr_Occurred()) return -1;
  if (keyed) {
    const auto* choice = tactics.table.find(key);
    if (choice != nullptr && choice->tuned) {
      if (choice->ask) return asked(self, choice->tactic, args, nargs, kwnames);
      ++tactics.hits;
      return choice->tactic;
    }
    if (tactics.table.size() < kMaxRememberedDefaults && key.device_type >= 0) {
      tactics.table.set(key, static_cast<uint8_t>(tactic), false);
    }
  }
  ++tactics.misses;
  return static_cast<int>(tactic);
}

}  // namespace

Keyed key_of_call(Tunable* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                  Key* key, uint64_t* allowed) try {
  return make_key(self, args, nargs, kwnames, key, allowed);
} catch (const std::exception&) {  // never `...`: CPython may be ending this daemon thread
  torch::translate_exception_to_python(std::current_exception());
  return Keyed::Error;
}

PyObject* call_tunable(PyObject* object, PyObject* const* args, size_t nargsf,
                       PyObject* kwnames) try {
  auto* self = reinterpret_cast<Tunable*>(object);
  auto alive = PyRef::borrow(object);
  if (self->tactics == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this tunable was called before it was made");
    return nullptr;
  }
  Tactics& tactics = *self->tactics;
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  if (HOTOP_UNLIKELY(tuning) && !timing_tactics) {
    return ask_python(self, "_tune", args, nargs, kwnames).release();
  }
  Key key;
  uint64_t allowed;
  const Keyed keyed = make_key(self, args, nargs, kwnames, &key, &allowed);
  if (HOTOP_UNLIKELY(keyed == Keyed::Error)) return nullptr;
  const auto* choice = keyed == Keyed::Yes ? tactics.table.find(key) : nullptr;
  int tactic;
  if (HOTOP_LIKELY(choice != nullptr)) {
    tactic = choice->tactic;
    if (HOTOP_UNLIKELY(choice->ask)) {
      tactic = asked(self, tactic, args, nargs, kwnames);
      if (tactic < 0) return nullptr;
    } else {
      ++(choice->tuned ? tactics.hits : tactics.misses);
    }
  } else {
    tactic = miss(self, key, keyed == Keyed::Yes, allowed, args, nargs, kwnames);
    if (tactic < 0) return nullptr;
  }
  if (HOTOP_UNLIKELY(static_cast<size_t>(tactic) >= tactics.functions.size())) {
    PyErr_SetString(PyExc_RuntimeError, "the chosen tactic does not exist");
    return nullptr;
  }
  auto function = PyRef::borrow(tactics.functions[tactic].get());
  // A tactic in C, such as another tunable, does not count its depth.
  return call_counted(thread_state(), " while calling a tactic",
                      [&] { return PyObject_Vectorcall(function.get(), args, nargsf, kwnames); });
} catch (const std::exception&) {  // never `...`: CPython may be ending this daemon thread
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

}  // namespace hotop
