// Building a plan from a schema, and the walk through the dispatcher's table.
#include "plan.h"

#include <c10/core/TensorOptions.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "python_compat.h"
#include "python_kernel.h"
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
    argument.symints =
        argument.kind == Kind::IntList && type->containedType(0)->kind() == TypeKind::SymIntType;
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
    plan.has_lists |= holds_tensors(argument.kind) && argument.kind != Kind::Tensor;
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
    plan.has_lists |= plan.return_kinds.back() == Kind::TensorList;
  }
  const size_t count = plan.return_kinds.size();
  plan.return_shape = count == 0   ? ReturnShape::None
                      : count == 1 ? ReturnShape::One
                                   : ReturnShape::Tuple;
}

Kernel* known_kernel(Plan& plan, const c10::OperatorKernel* functor) {
  if (functor == nullptr) return nullptr;
  for (Kernel& kernel : plan.kernels) {
    if (kernel.address == functor && !kernel.functor.expired()) return &kernel;
  }
  return nullptr;
}

// For an operator of a Library: what its table holds is taken as it is found.
Kernel* adopt_kernel(Plan& plan, const c10::KernelFunction& entry, c10::DispatchKey key) {
  if (plan.obligation != Obligation::Nothing) return nullptr;
  const auto& functor = kernel_functor(entry);
  if (PyObject* function = python_function_of(functor.get())) {
    // Kernels that are gone let go of their functions, whose end may run Python code, and leave
    // their place.
    std::vector<PyRef> gone;
    Kernel* place = nullptr;
    for (Kernel& kernel : plan.kernels) {
      if (kernel.role != Role::Backend || !kernel.functor.expired()) continue;
      gone.push_back(std::move(kernel.function));
      place = &kernel;
    }
    if (place != nullptr) {
      forget_routes(plan);  // the old kernel's address is free for another now
      place->functor = c10::weak_intrusive_ptr<c10::OperatorKernel>(functor);
      place->address = functor.get();
      place->function = PyRef::borrow(function);
      return place;
    }
    plan.kernels.push_back({Role::Backend, c10::weak_intrusive_ptr<c10::OperatorKernel>(functor),
                            functor.get(), PyRef::borrow(function), PyRef::borrow(Py_None)});
    return &plan.kernels.back();
  }
  const auto layer = c10::toFunctionalityKey(key);
  if (!c10::autograd_dispatch_keyset.has(layer) || !is_autograd_fallback(entry)) return nullptr;
  for (Kernel& kernel : plan.kernels) {
    if (kernel.role == Role::Fallback) return &kernel;
  }
  plan.kernels.push_back({Role::Fallback, c10::weak_intrusive_ptr<c10::OperatorKernel>(functor),
                          functor.get(), PyRef(), PyRef()});
  return &plan.kernels.back();
}

}  // namespace

void flatten_schema(Plan& plan) {
  const c10::FunctionSchema& schema = plan.handle.schema();
  plan.entry = &operator_entry(plan.handle);
  plan.name = c10::toString(plan.handle.operator_name());
  flatten_arguments(plan, schema);
  flatten_returns(plan, schema);
  plan.schema = std::make_shared<const c10::FunctionSchema>(schema);
  // PyTorch's own rule (torch/csrc/jit/python/init.cpp).
  const auto symbol = c10::Symbol::fromQualString(schema.name());
  plan.numbers_as_tensors =
      symbol.is_prims() ||
      (symbol.is_aten() && torch::should_allow_numbers_as_tensors(symbol.toUnqualString()));
}

void forget_routes(Plan& plan) {
  for (Route& route : plan.routes) route = Route{};
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
    if (kernel == nullptr) kernel = adopt_kernel(plan, entry, *stop);
    if (kernel == nullptr) return nullptr;
    route.stations[route.station_count++] = {&entry, kernel->address};
    switch (kernel->role) {
      case Role::Autocast:
        route.casts = true;
        route.kernel = kernel;
        break;
      case Role::Autograd:
        route.below_autograd = true;
        rest = rest & c10::after_autograd_keyset;
        continue;
      case Role::Fallback:
        if (route.station_count > 1) return nullptr;
        route.passes_fallback = true;
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
