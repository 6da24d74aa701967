// The boxed rung: a call's arguments converted by its plan, then one boxed call of the dispatcher.
//
// What reaches the dispatcher is what PyTorch's own entry would give it. A value whose conversion
// is not certain, or that may want to see the call itself, leaves the whole call to that entry.
#include "boxed.h"

#include <c10/util/SmallVector.h>
#include <cxxabi.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/QScheme.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>

#include "gate.h"
#include "torch_compat.h"
#include "values.h"

namespace hotop {

namespace {

using torch::jit::Stack;

PyObject* disabled_torch_function = nullptr;
PyObject* torch_function_name = nullptr;
PyObject* immutable_list = nullptr;  // torch.fx.immutable_collections.immutable_list
// PyTorch may keep a list for a SymInt[] argument as ints; what it does is asked once.
bool symint_lists_hold_ints = false;

// A Tensor that the dispatcher takes as it is: nobody's __torch_function__ is asked.
HOTOP_INLINE bool is_ordinary_tensor(PyObject* value) {
  if (HOTOP_LIKELY(is_exact_tensor(value))) return true;
  if (!is_tensor(value) || Py_TYPE(value)->tp_getattro != PyObject_GenericGetAttr ||
      _PyType_Lookup(Py_TYPE(value), torch_function_name) != disabled_torch_function) {
    return false;
  }
  PyObject** dict = _PyObject_GetDictPtr(value);  // PyTorch asks the object, not its class
  if (dict == nullptr || *dict == nullptr) return true;
  const int own = PyDict_Contains(*dict, torch_function_name);
  if (own < 0) PyErr_Clear();
  return own == 0;
}

bool is_number(PyObject* value) {
  return PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value) ||
         PyComplex_CheckExact(value);
}

// No attribute of these can surprise a conversion.
bool is_simple(PyObject* value) {
  return value == Py_None || is_number(value) || PyUnicode_CheckExact(value) ||
         Py_IS_TYPE(value, &THPDtypeType) || Py_IS_TYPE(value, &THPLayoutType) ||
         Py_IS_TYPE(value, &THPMemoryFormatType) || Py_IS_TYPE(value, &THPDeviceType) ||
         Py_IS_TYPE(value, &THPQSchemeType) ||
         Py_IS_TYPE(value, reinterpret_cast<PyTypeObject*>(THPGeneratorClass));
}

// Includes the lists that FX keeps in its graphs.
bool is_sequence(PyObject* value) {
  return PyList_CheckExact(value) || PyTuple_CheckExact(value) || Py_IS_TYPE(value, &THPSizeType) ||
         reinterpret_cast<PyObject*>(Py_TYPE(value)) == immutable_list;
}

// The conversion that PyTorch itself would make, for values that are rare.
HOTOP_COLD bool push_by_pytorch(const c10::Argument& declared, PyObject* value, Stack* stack) {
  bool simple = is_simple(value);
  if (!simple && is_sequence(value)) {
    simple = true;
    for (Py_ssize_t i = 0; simple && i < PySequence_Fast_GET_SIZE(value); ++i) {
      simple = is_simple(PySequence_Fast_GET_ITEM(value, i));
    }
  }
  if (!simple) return false;
  try {
    stack->push_back(torch::jit::toIValue(value, declared.real_type(), declared.N()));
    return true;
  } catch (const std::exception&) {  // PyTorch's entry will say it in its own words
    PyErr_Clear();
    return false;
  }
}

// An exact int that fits.
HOTOP_INLINE bool read_int(PyObject* value, int64_t* number) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

bool push_int_list(const c10::Argument& declared, PyObject* value, Stack* stack) {
  if (!is_sequence(value)) return push_by_pytorch(declared, value, stack);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  c10::List<int64_t> ints;
  ints.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    int64_t number = 0;
    if (!read_int(PySequence_Fast_GET_ITEM(value, i), &number)) {
      return push_by_pytorch(declared, value, stack);
    }
    ints.push_back(number);
  }
  stack->emplace_back(std::move(ints));
  return true;
}

bool push_tensor_list(PyObject* value, Stack* stack) {
  if (!is_sequence(value)) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  c10::List<at::Tensor> tensors;
  tensors.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* element = PySequence_Fast_GET_ITEM(value, i);
    if (!is_ordinary_tensor(element)) return false;
    tensors.push_back(THPVariable_Unpack(element));
  }
  stack->emplace_back(std::move(tensors));
  return true;
}

bool push_optional_tensor_list(const c10::Argument& declared, PyObject* value, Stack* stack) {
  if (!is_sequence(value)) return false;
  c10::TypePtr type = declared.real_type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->containedType(0);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  c10::impl::GenericList tensors(type->containedType(0));
  tensors.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* element = PySequence_Fast_GET_ITEM(value, i);
    if (element == Py_None) {
      tensors.push_back(c10::IValue());
    } else if (is_ordinary_tensor(element)) {
      tensors.push_back(c10::IValue(THPVariable_Unpack(element)));
    } else {
      return false;
    }
  }
  stack->emplace_back(std::move(tensors));
  return true;
}

// True when the value now stands on the stack.
HOTOP_INLINE bool push_value(const Plan& plan, int position, PyObject* value, Stack* stack) {
  const Argument& argument = plan.arguments[position];
  if (argument.kind == Kind::Tensor) {
    if (HOTOP_LIKELY(is_ordinary_tensor(value))) {
      stack->emplace_back(THPVariable_Unpack(value));
      return true;
    }
    if (value == Py_None) {
      if (argument.optional) {
        stack->emplace_back();
      } else {
        stack->emplace_back(at::Tensor());
      }
      return true;
    }
    return plan.numbers_as_tensors && is_number(value) &&
           push_by_pytorch(plan.schema->arguments()[position], value, stack);
  }
  if (value == Py_None && argument.optional) {
    stack->emplace_back();
    return true;
  }
  const c10::Argument& declared = plan.schema->arguments()[position];
  switch (argument.kind) {
    case Kind::Int: {
      int64_t number = 0;
      if (!read_int(value, &number)) break;
      stack->emplace_back(number);
      return true;
    }
    case Kind::Float:
      if (!PyFloat_CheckExact(value)) break;
      stack->emplace_back(PyFloat_AS_DOUBLE(value));
      return true;
    case Kind::Bool:
      if (!PyBool_Check(value)) break;
      stack->emplace_back(value == Py_True);
      return true;
    case Kind::Scalar: {
      int64_t number = 0;
      if (PyFloat_CheckExact(value)) {
        stack->emplace_back(PyFloat_AS_DOUBLE(value));
        return true;
      }
      if (!read_int(value, &number)) break;
      stack->emplace_back(number);
      return true;
    }
    case Kind::Dtype:
      if (!Py_IS_TYPE(value, &THPDtypeType)) break;
      stack->emplace_back(static_cast<int64_t>(reinterpret_cast<THPDtype*>(value)->scalar_type));
      return true;
    case Kind::Device:
      if (!Py_IS_TYPE(value, &THPDeviceType)) break;
      stack->emplace_back(reinterpret_cast<THPDevice*>(value)->device);
      return true;
    case Kind::TensorList:
      return push_tensor_list(value, stack);
    case Kind::OptionalTensorList:
      return push_optional_tensor_list(declared, value, stack);
    case Kind::IntList:
      if (argument.symints && !symint_lists_hold_ints) break;
      return push_int_list(declared, value, stack);
    default:
      break;
  }
  return push_by_pytorch(declared, value, stack);
}

bool fill_stack(const Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                Stack* stack) try {
  const int total = static_cast<int>(plan.arguments.size());
  PyObject* bound[kMaxArguments];
  PyObject* const* values = args;
  int count = static_cast<int>(nargs);
  if (kwnames != nullptr && PyTuple_GET_SIZE(kwnames) > 0) {
    Verdict verdict;
    count = bind_keywords(plan, args, nargs, kwnames, bound, &verdict);
    if (count < 0) return false;
    values = bound;
  }
  stack->reserve(std::max(plan.arguments.size(), plan.return_types.size()));
  for (int i = 0; i < total; ++i) {
    PyObject* value = i < count ? values[i] : nullptr;
    if (value != nullptr) {
      if (HOTOP_UNLIKELY(!push_value(plan, i, value, stack))) return false;
      continue;
    }
    const auto& usual = plan.schema->arguments()[i].default_value();
    if (HOTOP_UNLIKELY(!usual.has_value())) return false;
    stack->push_back(*usual);
  }
  return true;
} catch (const std::exception&) {  // as in push_by_pytorch
  PyErr_Clear();
  return false;
}

// What one call holds: the stack, and one more reference to each of its Tensors. A kernel drops its
// arguments, and a Tensor's last reference but the Python object's needs the GIL to go; so that one
// is dropped here, when the GIL is held again: 60 ns less per Tensor.
struct Held {
  Stack stack;
  c10::SmallVector<c10::IValue, 8> kept;
};

// The GIL is released as by PyTorch's entry. At exit CPython unwinds daemon threads that have no
// GIL: such a thread may neither take it nor drop a Tensor.
void call_without_gil(const c10::OperatorHandle& handle, Held* held) {
  PyThreadState* thread = PyEval_SaveThread();
  try {
    handle.callBoxed(&held->stack);
  } catch (abi::__forced_unwind&) {
    static_cast<void>(new Held(std::move(*held)));  // never freed
    throw;
  } catch (...) {
    PyEval_RestoreThread(thread);
    throw;
  }
  PyEval_RestoreThread(thread);
}

PyObject* call_dispatcher(const Plan& plan, Held* held) try {
  for (const int position : plan.tensor_positions) held->kept.push_back(held->stack[position]);
  const c10::OperatorHandle handle = plan.handle;
  with_entry_warnings([&] { call_without_gil(handle, held); });
  Stack& stack = held->stack;
  if (HOTOP_LIKELY(stack.size() == 1)) {
    c10::IValue& only = stack.front();
    // A wrapped number becomes a number again.
    if (HOTOP_LIKELY(only.isTensor() && !only.unsafeToTensorImpl()->is_wrapped_number())) {
      return THPVariable_Wrap(std::move(only).toTensor());
    }
    if (only.isInt()) return PyLong_FromLongLong(only.toInt());
  }
  return torch::jit::createPyObjectForStack(std::move(stack)).release().ptr();
} catch (abi::__forced_unwind&) {
  throw;
} catch (...) {
  set_entry_error();
  return nullptr;
}

bool may_call_boxed(const Plan& plan, Py_ssize_t nargs) {
  return plan.registered && nargs <= plan.positional_count &&
         function_modes(*thread_state().function_modes).empty();
}

}  // namespace

bool call_boxed(Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                PyObject** result) {
  if (!may_call_boxed(plan, nargs)) return false;
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(plan.numbers_as_tensors);
  Held held;
  if (!fill_stack(plan, args, nargs, kwnames, &held.stack)) return false;
  if (HOTOP_UNLIKELY(!plan.registered)) return false;  // a finalizer removed the operator
  ++plan.boxed_calls;
  *result = call_dispatcher(plan, &held);
  return true;
}

bool can_call_boxed(Plan& plan, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (!may_call_boxed(plan, nargs)) return false;
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(plan.numbers_as_tensors);
  Stack stack;
  return fill_stack(plan, args, nargs, kwnames, &stack);
}

bool load_boxed_objects() {
  auto torch_c = PyRef::steal(PyImport_ImportModule("torch._C"));
  auto numbers = PyRef::steal(Py_BuildValue("[i]", 1));
  if (!torch_c || !numbers) return false;
  torch_function_name = PyUnicode_InternFromString("__torch_function__");
  disabled_torch_function = PyObject_GetAttrString(torch_c.get(), "_disabled_torch_function_impl");
  if (torch_function_name == nullptr || disabled_torch_function == nullptr) return false;
  auto fx = PyRef::steal(PyImport_ImportModule("torch.fx.immutable_collections"));
  if (!fx) return false;
  immutable_list = PyObject_GetAttrString(fx.get(), "immutable_list");
  if (immutable_list == nullptr) return false;
  const auto type = c10::ListType::create(c10::SymIntType::get());
  symint_lists_hold_ints = torch::jit::toIValue(numbers.get(), type).isIntList();
  return true;
}

}  // namespace hotop
