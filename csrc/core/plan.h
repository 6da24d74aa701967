// The plan of an operator: its schema flattened once, and the kernels that may be called directly.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "py_ref.h"

namespace hotop {

constexpr int kMaxArguments = 64;  // the dispatcher's own limit

// What a value must be. `Other` is never called directly.
enum class Kind : uint8_t {
  Tensor,
  Int,
  Float,
  Bool,
  Str,
  Scalar,
  Dtype,
  Layout,
  MemoryFormat,
  Device,
  TensorList,
  OptionalTensorList,
  IntList,
  FloatList,
  BoolList,
  ScalarList,
  Other,
};

struct Argument {
  PyRef name;           // interned
  PyRef default_value;  // null when the argument is required
  Kind kind = Kind::Other;
  bool optional = false;  // None is a value of its type
  bool symints = false;   // a list of SymInt
  PyRef spare_list;       // empty, with room: the list of an earlier call that nobody kept
};

// How a kernel that hotop knows takes part in PyTorch's walk through the dispatcher.
enum class Role : uint8_t { Autocast, Autograd, Fallback, VersionBump, BackendSelect, Backend };

struct Kernel {
  Role role;
  // Weak, so that a destroyed kernel's address is not taken for a new one's.
  c10::weak_intrusive_ptr<c10::OperatorKernel> functor;
  const c10::OperatorKernel* address;
  PyRef function;     // Backend only: what to call
  PyRef device_type;  // Backend only: str, or None for the default kernel
  // Autocast only: the rule.
  c10::DispatchKey cast_key = c10::DispatchKey::Undefined;
  c10::DeviceType cast_device = c10::DeviceType::CPU;
  c10::ScalarType cast_dtype = c10::ScalarType::Undefined;
};

// One proven walk: for this key set the dispatcher would end in `kernel`.
struct Route {
  struct Station {
    const c10::KernelFunction* entry;
    const c10::OperatorKernel* expected;
  };
  uint64_t keys = 0;
  Kernel* kernel = nullptr;
  uint8_t station_count = 0;
  bool below_autograd = false;
  bool passes_fallback = false;  // PyTorch's autograd kernel for operators that have none
  bool bumps_versions = false;
  bool selects_backend = false;
  bool casts = false;  // `kernel` is an autocast rule, which calls the op again
  Station stations[4];
};

enum class ReturnShape : uint8_t { None, One, Tuple };
// What is asked of a result besides its type. Nothing: the kernels of a Library, which may be any.
enum class Obligation : uint8_t { NoAlias, View, Inplace, Out, Nothing };

struct Plan {
  explicit Plan(c10::OperatorHandle handle) : handle(std::move(handle)) {}

  c10::OperatorHandle handle;
  const c10::impl::OperatorEntry* entry = nullptr;
  bool live = false;                // false: never direct (kind unknown, or the definition is gone)
  bool registered = true;           // the dispatcher still has the operator
  bool numbers_as_tensors = false;  // PyTorch takes a number where a Tensor is declared

  std::vector<Argument> arguments;
  std::vector<uint8_t> tensor_positions;  // every argument that can hold Tensors
  std::vector<uint8_t> mutated_positions;
  std::vector<Kind> return_kinds;
  // Copies: the dispatcher's own schema may go during a call.
  std::vector<c10::TypePtr> return_types;
  std::shared_ptr<const c10::FunctionSchema> schema;
  std::string name;
  int positional_count = 0;  // arguments before the keyword-only ones
  int required_count = 0;    // shortest call that could be complete
  int plain_tensors = 0;     // leading arguments that are all `Tensor`
  int device_position = -1;
  ReturnShape return_shape = ReturnShape::None;
  Obligation obligation = Obligation::NoAlias;

  std::deque<Kernel> kernels;  // addresses stay valid
  Route routes[4];
  unsigned next_route = 0;
  uint64_t direct_calls = 0;
  uint64_t boxed_calls = 0;
  uint64_t pytorch_calls = 0;

  // The class of the node that a recorded call makes. Null: such a call is PyTorch's.
  PyRef node_type;
  PyRef make_formula;   // calls set_formula, once, when a call is first to be recorded
  PyRef setup_context;  // the formula's parts, or null
  PyRef backward;
  bool has_lists = false;  // an argument or a return is a list of Tensors: autograd takes it apart

  // check_result(device_type, args, kwargs, result): PyTorch's checks on a result, in Python.
  PyRef check_result;
  std::string unsupported;  // why `live` is false from the start

  // What the garbage collector must see, besides arguments and kernels.
  std::array<PyRef*, 5> objects() {
    return {&node_type, &make_formula, &setup_context, &backward, &check_result};
  }
};

struct PlanObject {
  PyObject_HEAD Plan* plan;
};

extern PyTypeObject* PlanType;

// Registers the Plan type in the module.
bool add_plan_type(PyObject* module);

// Fills a new plan from the schema of its operator.
void flatten_schema(Plan& plan);

void forget_routes(Plan& plan);

// The walk of `keys` through the dispatcher, remembered in the plan. Null when it would not end in
// a known kernel; then `*stop` is the key where it leaves the known road.
const Route* find_route(Plan& plan, c10::DispatchKeySet keys, c10::DispatchKey* stop);

// The kernel that a BackendSelect would choose for this device; null when PyTorch must decide.
Kernel* kernel_for_device(Plan& plan, PyObject* device);

}  // namespace hotop
