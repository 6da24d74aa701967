// Attribute look-ups on torch.ops, its namespaces and packets, without Python's __getattr__ detour.
//
// A class with a __getattr__ pays 90 ns for every attribute that it does have. Here the ordinary
// look-up comes first and the class's own way is taken only on a miss, which gives the same answer.
#include "lookup.h"

#include <vector>

#include "python_compat.h"

namespace hotop {

namespace {

struct Shortened {
  PyTypeObject* type;  // kept alive
  getattrofunc original;
};

std::vector<Shortened>& shortened() {
  static std::vector<Shortened> types;
  return types;
}

HOTOP_COLD PyObject* get_on_miss(PyObject* self, PyObject* name) {
  for (const Shortened& entry : shortened()) {
    if (PyType_IsSubtype(Py_TYPE(self), entry.type)) return entry.original(self, name);
  }
  return PyObject_GenericGetAttr(self, name);
}

// A module's ordinary look-up, when its class has no attribute of that name.
HOTOP_INLINE PyObject* get_from_module(PyObject* self, PyObject* name) {
  if (!PyModule_Check(self) || _PyType_Lookup(Py_TYPE(self), name) != nullptr) return nullptr;
  PyObject* value = PyDict_GetItemWithError(PyModule_GetDict(self), name);
  Py_XINCREF(value);
  return value;
}

PyObject* get_attribute(PyObject* self, PyObject* name) {
  PyObject* found = get_from_module(self, name);
  if (HOTOP_LIKELY(found != nullptr)) return found;
  if (PyErr_Occurred()) return nullptr;
  PyObject* value = _PyObject_GenericGetAttrWithDict(self, name, nullptr, /*suppress=*/1);
  if (HOTOP_LIKELY(value != nullptr)) return value;
  return PyErr_Occurred() ? nullptr : get_on_miss(self, name);
}

// shorten_lookups(cls): for a class that has __getattr__ and not __getattribute__.
PyObject* shorten_lookups(PyObject*, PyObject* object) {
  if (!PyType_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "expected a class");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  if (type->tp_getattro != get_attribute) {
    Py_INCREF(type);
    shortened().insert(shortened().begin(), Shortened{type, type->tp_getattro});
    type->tp_getattro = get_attribute;
    PyType_Modified(type);
  }
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef lookup_functions[] = {
    {"shorten_lookups", shorten_lookups, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
