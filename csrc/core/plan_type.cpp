// hotop._core.Plan: the plan of an operator as a Python object.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_function.h>

#include "plan.h"
#include "registered.h"
#include "torch_compat.h"

namespace hotop {

namespace {

bool parse_obligation(const std::string& text, Obligation* obligation) {
  if (text == "no_alias")
    *obligation = Obligation::NoAlias;
  else if (text == "view")
    *obligation = Obligation::View;
  else if (text == "inplace")
    *obligation = Obligation::Inplace;
  else if (text == "out")
    *obligation = Obligation::Out;
  else if (text == "nothing")
    *obligation = Obligation::Nothing;
  else
    return false;
  return true;
}

Plan& plan_of(PyObject* self) { return *reinterpret_cast<PlanObject*>(self)->plan; }

// Plan(name, overload_name, obligation, check_result)
PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  const char* overload_name = nullptr;
  const char* obligation = nullptr;
  PyObject* check_result = nullptr;
  if (!PyArg_ParseTuple(args, "sssO:Plan", &name, &overload_name, &obligation, &check_result)) {
    return nullptr;
  }
  auto self = PyRef::steal(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto plan =
      std::make_unique<Plan>(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload_name));
  flatten_schema(*plan);
  plan->check_result = PyRef::borrow(check_result);
  TORCH_CHECK(parse_obligation(obligation, &plan->obligation), "unknown obligation ", obligation);
  plan->live = plan->unsupported.empty();
  reinterpret_cast<PlanObject*>(self.get())->plan = plan.release();
  watch_registration(plan_of(self.get()));
  return self.release();
  END_HANDLE_TH_ERRORS
}

int plan_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Plan* plan = reinterpret_cast<PlanObject*>(self)->plan;
  if (plan == nullptr) return 0;
  for (PyRef* object : plan->objects()) Py_VISIT(object->get());
  for (const Argument& argument : plan->arguments) {
    Py_VISIT(argument.default_value.get());
    Py_VISIT(argument.spare_list.get());
  }
  for (const Kernel& kernel : plan->kernels) Py_VISIT(kernel.function.get());
  return 0;
}

int plan_clear(PyObject* self) {
  Plan* plan = reinterpret_cast<PlanObject*>(self)->plan;
  if (plan == nullptr) return 0;
  plan->live = false;
  forget_routes(*plan);
  for (PyRef* object : plan->objects()) *object = PyRef();
  for (Kernel& kernel : plan->kernels) kernel.function = PyRef();
  return 0;
}

void plan_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Plan* plan = reinterpret_cast<PlanObject*>(self)->plan;
  if (plan != nullptr) unwatch_registration(*plan);
  delete plan;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

Role role_named(const std::string& text) {
  if (text == "autocast") return Role::Autocast;
  if (text == "autograd") return Role::Autograd;
  if (text == "version_bump") return Role::VersionBump;
  if (text == "backend_select") return Role::BackendSelect;
  TORCH_CHECK_VALUE(text == "backend", "unknown role ", text);
  return Role::Backend;
}

// add_kernel(role, dispatch_key, function, device_type): the kernel that now stands at this key. An
// autocast rule gives its dtype as the function.
PyObject* plan_add_kernel(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* role_name = nullptr;
  const char* key_name = nullptr;
  PyObject* function = nullptr;
  PyObject* device_type = nullptr;
  if (!PyArg_ParseTuple(args, "ssOO:add_kernel", &role_name, &key_name, &function, &device_type)) {
    return nullptr;
  }
  Plan& plan = plan_of(self);
  const c10::DispatchKey key = c10::parseDispatchKey(key_name);
  const auto& functor = kernel_functor(plan.entry->kernelForDispatchKey(key));
  TORCH_CHECK(functor.defined(), "no boxed kernel stands at ", key_name, " for ",
              plan.handle.operator_name());
  Kernel kernel{role_named(role_name), c10::weak_intrusive_ptr<c10::OperatorKernel>(functor),
                functor.get(), PyRef::borrow(function), PyRef::borrow(device_type)};
  if (kernel.role == Role::Autocast) {
    TORCH_CHECK_TYPE(THPDtype_Check(function) && PyUnicode_Check(device_type),
                     "an autocast rule is a dtype and a device type");
    kernel.cast_key = key;
    kernel.cast_dtype = reinterpret_cast<THPDtype*>(function)->scalar_type;
    kernel.cast_device = c10::Device(PyUnicode_AsUTF8(device_type)).type();
  }
  plan.kernels.push_back(std::move(kernel));
  forget_routes(plan);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// set_function(device_type, function): what the kernel of this device type calls from now on.
PyObject* plan_set_function(PyObject* self, PyObject* args) {
  PyObject* device_type = nullptr;
  PyObject* function = nullptr;
  if (!PyArg_ParseTuple(args, "OO:set_function", &device_type, &function)) return nullptr;
  for (Kernel& kernel : plan_of(self).kernels) {
    if (kernel.role != Role::Backend) continue;
    const int same = PyObject_RichCompareBool(kernel.device_type.get(), device_type, Py_EQ);
    if (same < 0) return nullptr;
    if (same) kernel.function = PyRef::borrow(function);
  }
  Py_RETURN_NONE;
}

// set_formula(node_type, setup_context, backward): how a call that autograd records is made.
PyObject* plan_set_formula(PyObject* self, PyObject* args) {
  PyObject* node_type = nullptr;
  PyObject* setup_context = nullptr;
  PyObject* backward = nullptr;
  if (!PyArg_ParseTuple(args, "O!OO:set_formula", &PyType_Type, &node_type, &setup_context,
                        &backward)) {
    return nullptr;
  }
  if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(node_type), &THPFunctionType)) {
    PyErr_SetString(PyExc_TypeError, "set_formula takes a class of autograd nodes");
    return nullptr;
  }
  Plan& plan = plan_of(self);
  plan.node_type = PyRef::borrow(node_type);
  plan.setup_context = setup_context == Py_None ? PyRef() : PyRef::borrow(setup_context);
  plan.backward = backward == Py_None ? PyRef() : PyRef::borrow(backward);
  Py_RETURN_NONE;
}

// forget_backward(): the nodes of this plan ask PyTorch's own backward from now on.
PyObject* plan_forget_backward(PyObject* self, PyObject*) {
  const PyRef formula = std::move(plan_of(self).backward);
  Py_RETURN_NONE;
}

// make_formula_by(make): make() calls set_formula if such calls can be made directly.
PyObject* plan_make_formula_by(PyObject* self, PyObject* make) {
  plan_of(self).make_formula = PyRef::borrow(make);
  Py_RETURN_NONE;
}

// retire(): the definition is gone; every later call is PyTorch's.
PyObject* plan_retire(PyObject* self, PyObject*) {
  Plan& plan = plan_of(self);
  plan.live = false;
  plan.registered = false;
  plan.unsupported = "its definition was replaced or removed";
  forget_routes(plan);
  // A weak reference keeps the whole kernel object, and with it the Python function inside.
  for (Kernel& kernel : plan.kernels) {
    kernel.functor.reset();
    kernel.address = nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* plan_calls(PyObject* self, void* road) {
  const Plan& plan = plan_of(self);
  const uint64_t Plan::* counts[] = {&Plan::direct_calls, &Plan::boxed_calls, &Plan::pytorch_calls};
  return PyLong_FromUnsignedLongLong(plan.*counts[reinterpret_cast<intptr_t>(road)]);
}

PyMethodDef plan_methods[] = {
    {"add_kernel", plan_add_kernel, METH_VARARGS, nullptr},
    {"set_function", plan_set_function, METH_VARARGS, nullptr},
    {"make_formula_by", plan_make_formula_by, METH_O, nullptr},
    {"set_formula", plan_set_formula, METH_VARARGS, nullptr},
    {"forget_backward", plan_forget_backward, METH_NOARGS, nullptr},
    {"retire", plan_retire, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef plan_attributes[] = {
    {"direct_calls", plan_calls, nullptr, nullptr, reinterpret_cast<void*>(0)},
    {"boxed_calls", plan_calls, nullptr, nullptr, reinterpret_cast<void*>(1)},
    {"pytorch_calls", plan_calls, nullptr, nullptr, reinterpret_cast<void*>(2)},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(plan_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(plan_clear)},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_attributes},
    {0, nullptr},
};

PyType_Spec plan_spec = {"hotop._core.Plan", sizeof(PlanObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plan_slots};

}  // namespace

PyTypeObject* PlanType = nullptr;

bool add_plan_type(PyObject* module) {
  PlanType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plan_spec));
  return PlanType != nullptr &&
         PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject*>(PlanType)) == 0;
}

}  // namespace hotop
