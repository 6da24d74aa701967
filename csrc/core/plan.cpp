// Building a plan from a schema, and the walk through the dispatcher's table.
#include "plan.h"

#include <c10/core/TensorOptions.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "python_compat.h"
#include "torch_compat.h"

namespace hotop {

namespace {

using c10::TypeKind;

Kind list_kind(const c10::Type& element) {
  switch (element.kind()) {
    case TypeKind::TensorType:
      return Kind::TensorList;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return Kind::IntList;
    case TypeKind::FloatType:
      return Kind::FloatList;
    case TypeKind::BoolType:
      return Kind::BoolList;
    case TypeKind::NumberType:
      return Kind::ScalarList;
    case TypeKind::OptionalType:
      return element.containedType(0)->kind() == TypeKind::TensorType ? Kind::OptionalTensorList
                                                                      : Kind::Other;
    default:
      return Kind::Other;
  }
}

Kind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case TypeKind::TensorType:
      return Kind::Tensor;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return Kind::Int;
    case TypeKind::FloatType:
      return Kind::Float;
    case TypeKind::BoolType:
      return Kind::Bool;
    case TypeKind::StringType:
      return Kind::Str;
    case TypeKind::NumberType:
      return Kind::Scalar;
    case TypeKind::ScalarTypeType:
      return Kind::Dtype;
    case TypeKind::LayoutType:
      return Kind::Layout;
    case TypeKind::MemoryFormatType:
      return Kind::MemoryFormat;
    case TypeKind::DeviceObjType:
      return Kind::Device;
    case TypeKind::ListType:
      return list_kind(*type.containedType(0));
    default:
      return Kind::Other;
  }
}

bool holds_tensors(Kind kind) {
  return kind == Kind::Tensor || kind == Kind::TensorList || kind == Kind::OptionalTensorList;
}

// A schema default as the Python object that a kernel would receive.
PyRef default_object(const c10::IValue& value, Kind kind) {
  if (value.isInt() && kind == Kind::Dtype) {
    return PyRef::borrow(reinterpret_cast<PyObject*>(
        torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
  }
  if (value.isInt() && kind == Kind::Layout) {
    return PyRef::borrow(
        reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
  }
  if (value.isInt() && kind == Kind::MemoryFormat) {
    return PyRef::borrow(
        torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
  }
  return PyRef::steal(torch::jit::toPyObject(value).release().ptr());
}

PyRef interned(const std::string& text) {
  return PyRef::steal(PyUnicode_InternFromString(text.c_str()));
}

void flatten_arguments(Plan& plan, const c10::FunctionSchema& schema) {
  bool still_plain = true;
  int position = 0;
  plan.positional_count = 0;
  for (const c10::Argument& declared : schema.arguments()) {
    Argument argument;
    c10::TypePtr type = declared.real_type();
    if (type->kind() == TypeKind::OptionalType) {
      argument.optional = true;
      type = type->containedType(0);
    }
    argument.kind = kind_of(*type);
    // PyTorch does not dispatch on an optional list of Tensors; leave that to it.
    if (argument.optional && holds_tensors(argument.kind) && argument.kind != Kind::Tensor) {
      argument.kind = Kind::Other;
    }
    if (argument.kind == Kind::Other) {
      plan.unsupported = "argument '" + declared.name() + "' has the type " + type->repr_str();
    }
    argument.name = interned(declared.name());
    if (declared.default_value().has_value()) {
      argument.default_value = default_object(*declared.default_value(), argument.kind);
    }
    if (!declared.kwarg_only()) ++plan.positional_count;
    if (!argument.default_value) plan.required_count = position + 1;
    still_plain = still_plain && argument.kind == Kind::Tensor && !argument.optional;
    plan.plain_tensors += still_plain;
    if (holds_tensors(argument.kind)) plan.tensor_positions.push_back(position);
    if (declared.alias_info() != nullptr && declared.alias_info()->isWrite()) {
      plan.mutated_positions.push_back(position);
    }
    if (argument.kind == Kind::Device && declared.name() == "device" && plan.device_position < 0) {
      plan.device_position = position;
    }
    plan.arguments.push_back(std::move(argument));
    ++position;
  }
}

void flatten_returns(Plan& plan, const c10::FunctionSchema& schema) {
  for (const c10::Argument& declared : schema.returns()) {
    plan.return_kinds.push_back(kind_of(*declared.real_type()));
    plan.return_types.push_back(declared.real_type());
  }
  const size_t count = plan.return_kinds.size();
  plan.return_shape = count == 0   ? ReturnShape::None
                      : count == 1 ? ReturnShape::One
                                   : ReturnShape::Tuple;
}

bool parse_obligation(const std::string& text, Obligation* obligation) {
  if (text == "no_alias")
    *obligation = Obligation::NoAlias;
  else if (text == "view")
    *obligation = Obligation::View;
  else if (text == "inplace")
    *obligation = Obligation::Inplace;
  else if (text == "out")
    *obligation = Obligation::Out;
  else
    return false;
  return true;
}

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
  const c10::FunctionSchema& schema = plan->handle.schema();
  plan->entry = &operator_entry(plan->handle);
  plan->name = c10::toString(plan->handle.operator_name());
  flatten_arguments(*plan, schema);
  flatten_returns(*plan, schema);
  plan->schema = std::make_shared<const c10::FunctionSchema>(schema);
  plan->check_result = PyRef::borrow(check_result);
  TORCH_CHECK(parse_obligation(obligation, &plan->obligation), "unknown obligation ", obligation);
  plan->live = plan->unsupported.empty();
  reinterpret_cast<PlanObject*>(self.get())->plan = plan.release();
  return self.release();
  END_HANDLE_TH_ERRORS
}

Plan& plan_of(PyObject* self) { return *reinterpret_cast<PlanObject*>(self)->plan; }

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

void forget_routes(Plan& plan) {
  for (Route& route : plan.routes) route = Route{};
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
  delete reinterpret_cast<PlanObject*>(self)->plan;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// add_kernel(role, dispatch_key, function, device_type): the kernel that now stands at this key.
PyObject* plan_add_kernel(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* role_name = nullptr;
  const char* key_name = nullptr;
  PyObject* function = nullptr;
  PyObject* device_type = nullptr;
  if (!PyArg_ParseTuple(args, "ssOO:add_kernel", &role_name, &key_name, &function, &device_type)) {
    return nullptr;
  }
  const std::string role_text = role_name;
  const Role role = role_text == "autograd"         ? Role::Autograd
                    : role_text == "version_bump"   ? Role::VersionBump
                    : role_text == "backend_select" ? Role::BackendSelect
                                                    : Role::Backend;
  Plan& plan = plan_of(self);
  const c10::DispatchKey key = c10::parseDispatchKey(key_name);
  const auto& functor = kernel_functor(plan.entry->kernelForDispatchKey(key));
  TORCH_CHECK(functor.defined(), "no boxed kernel stands at ", key_name, " for ",
              plan.handle.operator_name());
  plan.kernels.push_back(Kernel{role, c10::weak_intrusive_ptr<c10::OperatorKernel>(functor),
                                functor.get(), PyRef::borrow(function),
                                PyRef::borrow(device_type)});
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

// set_formula(record, setup_context): how a call that autograd records is made.
PyObject* plan_set_formula(PyObject* self, PyObject* args) {
  PyObject* record = nullptr;
  PyObject* setup_context = nullptr;
  if (!PyArg_ParseTuple(args, "OO:set_formula", &record, &setup_context)) return nullptr;
  Plan& plan = plan_of(self);
  plan.record = PyRef::borrow(record);
  plan.setup_context = setup_context == Py_None ? PyRef() : PyRef::borrow(setup_context);
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
  plan.unsupported = "its definition was replaced or removed";
  forget_routes(plan);
  // A weak reference keeps the whole kernel object, and with it the Python function inside.
  for (Kernel& kernel : plan.kernels) {
    kernel.functor.reset();
    kernel.address = nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* plan_direct_calls(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(plan_of(self).direct_calls);
}

PyMethodDef plan_methods[] = {
    {"add_kernel", plan_add_kernel, METH_VARARGS, nullptr},
    {"set_function", plan_set_function, METH_VARARGS, nullptr},
    {"make_formula_by", plan_make_formula_by, METH_O, nullptr},
    {"set_formula", plan_set_formula, METH_VARARGS, nullptr},
    {"retire", plan_retire, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef plan_attributes[] = {
    {"direct_calls", plan_direct_calls, nullptr, nullptr, nullptr},
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

Kernel* known_kernel(Plan& plan, const c10::OperatorKernel* functor) {
  if (functor == nullptr) return nullptr;
  for (Kernel& kernel : plan.kernels) {
    if (kernel.address == functor && !kernel.functor.expired()) return &kernel;
  }
  return nullptr;
}

}  // namespace

PyTypeObject* PlanType = nullptr;

bool add_plan_type(PyObject* module) {
  PlanType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plan_spec));
  return PlanType != nullptr &&
         PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject*>(PlanType)) == 0;
}

const Route* find_route(Plan& plan, c10::DispatchKeySet keys, c10::DispatchKey* stop) {
  const DispatchTable& table = dispatch_table(*plan.entry);
  Route route;
  route.keys = keys.raw_repr();
  c10::DispatchKeySet rest = keys;
  while (route.station_count < 4) {
    *stop = rest.highestPriorityTypeId();
    const int index = rest.getDispatchTableIndexForDispatchKeySet();
    if (index < 0) return nullptr;
    const c10::KernelFunction& entry = table[index];
    Kernel* kernel = known_kernel(plan, kernel_functor(entry).get());
    if (kernel == nullptr) return nullptr;
    route.stations[route.station_count++] = {&entry, kernel->address};
    switch (kernel->role) {
      case Role::Autograd:
        route.below_autograd = true;
        rest = rest & c10::after_autograd_keyset;
        continue;
      case Role::VersionBump:
        route.bumps_versions = true;
        rest = rest & c10::after_ADInplaceOrView_keyset;
        continue;
      case Role::BackendSelect:
        route.selects_backend = true;
        break;
      case Role::Backend:
        route.kernel = kernel;
        break;
    }
    Route& place = plan.routes[plan.next_route++ % 4];
    place = route;
    return &place;
  }
  return nullptr;
}

Kernel* kernel_for_device(Plan& plan, PyObject* device) try {
  const c10::Device wanted = reinterpret_cast<THPDevice*>(device)->device;
  const c10::DispatchKey key =
      c10::computeDispatchKey(std::nullopt, std::nullopt, std::optional<c10::Device>(wanted));
  const int index = c10::DispatchKeySet(key).getDispatchTableIndexForDispatchKeySet();
  if (index < 0) return nullptr;
  const c10::KernelFunction& entry = dispatch_table(*plan.entry)[index];
  Kernel* kernel = known_kernel(plan, kernel_functor(entry).get());
  // The default kernel does not count: PyTorch demands one registered for the device type.
  const bool registered =
      kernel != nullptr && kernel->role == Role::Backend && kernel->device_type.get() != Py_None;
  return registered ? kernel : nullptr;
} catch (const std::exception&) {
  return nullptr;  // no dispatch key for this device type: PyTorch says so better
}

}  // namespace hotop
