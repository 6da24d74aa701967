// One tunable's tactics, choices and counters, and the look-up that a call makes.
#pragma once

#include <Python.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "tuning_key.h"

namespace hotop {

struct Tactics {
  std::vector<KeyedParameter> parameters;
  std::vector<PyRef> functions;  // 0: the default
  int choice_parameter = -1;     // the str that names the allowed backends
  bool mutates = false;          // a parameter is changed
  ChoiceTable table;
  uint64_t loaded_devices = 0;  // bit per device type: its file was read
  int64_t hits = 0;
  int64_t misses = 0;
  // Which tactics each str object allows. The reference keeps the address from being reused.
  std::unordered_map<PyObject*, std::pair<PyRef, uint64_t>> allowed;
  PyObject* last_text = nullptr;
  uint64_t last_allowed = 0;
  PyRef objects;  // dict: values without an integer form -> their number
};

struct Tunable {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* weakrefs;
  Tactics* tactics;
};

// While true, every call of a tunable goes to Python: a tuning session is open.
extern bool tuning;

// True in a thread that times a tactic: tunables below it run as they will.
extern thread_local bool timing_tactics;

enum class Keyed : uint8_t { Yes, No, Error };

// `No`: this call cannot be tuned, or it is malformed and the default tactic will say so.
// `allowed` is 0 when the call ended before its allowed backends were read.
Keyed key_of_call(Tunable* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                  Key* key, uint64_t* allowed);

// A hashable value's part of a key: its number in this tunable.
Keyed add_object(Tactics& tactics, Key* key, PyObject* value);

PyObject* call_tunable(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* kwnames);

}  // namespace hotop
