// PyInit__core: the build stamp, then types and functions.
#include <Python.h>

#include <cstring>

#include "autograd_guard.h"
#include "boxed.h"
#include "explain.h"
#include "gate.h"
#include "lookup.h"
#include "node.h"
#include "python_kernel.h"
#include "slot.h"
#include "tunable.h"

namespace {

// A binary built for another PyTorch loads without complaint and corrupts memory, so ask first.
bool torch_matches() {
  auto torch = hotop::PyRef::steal(PyImport_ImportModule("torch"));
  if (!torch) return false;
  auto version = hotop::PyRef::steal(PyObject_GetAttrString(torch.get(), "__version__"));
  if (!version) return false;
  auto text = hotop::PyRef::steal(PyObject_Str(version.get()));
  const char* found = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (found == nullptr) return false;
  // The minor version decides: "2.13.0+cpu" serves "2.13".
  const size_t length = std::strlen(HOTOP_TORCH_MINOR);
  if (std::strncmp(found, HOTOP_TORCH_MINOR, length) == 0 && found[length] == '.') return true;
  PyErr_Format(PyExc_ImportError,
               "hotop._core was built for PyTorch " HOTOP_TORCH_MINOR
               " but this is PyTorch %s; rebuild it with: " HOTOP_REBUILD_COMMAND,
               found);
  return false;
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "hotop._core", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() {
  if (!torch_matches()) return nullptr;
  auto module = hotop::PyRef::steal(PyModule_Create(&definition));
  if (!module || PyModule_AddFunctions(module.get(), hotop::slot_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::explain_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::autograd_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::lookup_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::tunable_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::node_functions) < 0 ||
      PyModule_AddFunctions(module.get(), hotop::python_kernel_functions) < 0 ||
      !hotop::add_plan_type(module.get()) || !hotop::add_slot_type(module.get()) ||
      !hotop::add_tunable_type(module.get()) || !hotop::load_gate_objects() ||
      !hotop::load_boxed_objects() ||
      PyModule_AddStringConstant(module.get(), "TORCH_VERSION", HOTOP_TORCH_VERSION) < 0) {
    return nullptr;
  }
  return module.release();
}
