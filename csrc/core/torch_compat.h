// Everything that differs between PyTorch versions, and the private members that hotop reads.
//
// The dispatcher's table of an operator is private. Naming a private member in an explicit
// instantiation is legal C++, so a PyTorch that renames one fails to compile here, and only here.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <array>
#include <memory>
#include <unordered_set>
#include <vector>

#include "py_ref.h"
#include "py_warnings.h"

// 2.14: node creation hooks, output_grad_dtypes, the node that _wrap_outputs attached.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#include <torch/csrc/Dtype.h>
#define HOTOP_TORCH_2_14 1
#endif
// 2.15: warnings and exceptions of C++ are translated at an operator's entry.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define HOTOP_TORCH_2_15 1
#endif

namespace hotop {

using DispatchTable = std::array<c10::KernelFunction, c10::num_runtime_entries>;
using FunctionModes = std::vector<std::shared_ptr<c10::SafePyObject>>;
using KeyMasks = std::array<c10::DispatchKeySet, c10::num_backends>;

namespace detail {

template <typename Tag, typename Tag::type Member>
struct Expose {
  friend constexpr typename Tag::type reach(Tag) { return Member; }
};

#define HOTOP_EXPOSE(Name, Class, member, Type) \
  struct Name {                                 \
    using type = Type Class::*;                 \
    friend constexpr type reach(Name);          \
  };                                            \
  template struct Expose<Name, &Class::member>;

HOTOP_EXPOSE(TableTag, c10::impl::OperatorEntry, dispatchTable_, DispatchTable)
HOTOP_EXPOSE(MaskTag, c10::DispatchKeyExtractor, nonFallthroughKeys_, c10::DispatchKeySet)
HOTOP_EXPOSE(MasksTag, c10::DispatchKeyExtractor, nonFallthroughKeysPerBackend_, KeyMasks)
HOTOP_EXPOSE(PerBackendTag, c10::DispatchKeyExtractor, requiresBitsetPerBackend_, bool)
HOTOP_EXPOSE(BoxedTag, c10::KernelFunction, boxed_kernel_func_, c10::BoxedKernel)
HOTOP_EXPOSE(FunctorTag, c10::BoxedKernel, functor_, c10::intrusive_ptr<c10::OperatorKernel>)
HOTOP_EXPOSE(ModesTag, at::impl::PythonTorchFunctionTLS, stack_, FunctionModes)
#undef HOTOP_EXPOSE

const c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& handle);
template <auto Member>
struct ExposeEntry {
  friend const c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& handle) {
    return (handle.*Member)->op;
  }
};
template struct ExposeEntry<&c10::OperatorHandle::operatorDef_>;

}  // namespace detail

// The operator's entry in the dispatcher: table and key mask stay at one address while it exists.
inline const c10::impl::OperatorEntry& operator_entry(const c10::OperatorHandle& handle) {
  return detail::entry_of(handle);
}

inline const DispatchTable& dispatch_table(const c10::impl::OperatorEntry& entry) {
  return entry.*reach(detail::TableTag{});
}

// The object behind a boxed kernel; for a kernel registered from Python it is unique.
inline const c10::intrusive_ptr<c10::OperatorKernel>& kernel_functor(
    const c10::KernelFunction& kernel) {
  return (kernel.*reach(detail::BoxedTag{})).*reach(detail::FunctorTag{});
}

// The dispatcher's own rule: keys of the call, less those that fall through for this operator.
inline c10::DispatchKeySet without_fallthrough(const c10::DispatchKeyExtractor& extractor,
                                               c10::DispatchKeySet keys) {
  if (C10_UNLIKELY(extractor.*reach(detail::PerBackendTag{}))) {
    return keys & (extractor.*reach(detail::MasksTag{}))[keys.getBackendIndex()];
  }
  return keys & extractor.*reach(detail::MaskTag{});
}

// 2.15's own entry for an operator turns warnings of C++ into Python's; 2.14's leaves them to
// stderr.
template <typename Action>
void with_entry_warnings(Action action) {
#ifdef HOTOP_TORCH_2_15
  with_python_warnings(action);
#else
  action();
#endif
}

// In a catch block: sets the Python error that the entry makes of the exception. 2.14's leaves that
// to pybind11's translators; 2.15's makes a RuntimeError of most standard exceptions.
inline void set_entry_error() {
#ifdef HOTOP_TORCH_2_15
  try {
    throw;
  } catch (py::error_already_set&) {
  } catch (py::builtin_exception&) {
  } catch (torch::jit::JITException&) {
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return;
  } catch (...) {
  }
#endif
  py::detail::try_translate_exceptions();
}

// The torch function modes of a thread, the innermost last.
inline const FunctionModes& function_modes(const at::impl::PythonTorchFunctionTLS& state) {
  return state.*reach(detail::ModesTag{});
}

inline bool has_tangent(const c10::AutogradMetaInterface* meta) {
  // The holder stays when its dual level is left; then it is empty.
  const auto& holder = static_cast<const torch::autograd::AutogradMeta*>(meta)->fw_grad_;
  return holder != nullptr && !holder->empty();
}

// autograd's own treatment of the outputs of an autograd.Function, without forward mode: a call
// with tangents is PyTorch's.
inline std::vector<std::optional<at::Tensor>> wrap_outputs(
    const std::vector<at::Tensor>& inputs,
    const std::unordered_set<at::TensorImpl*>& non_differentiable,
    const std::unordered_set<at::TensorImpl*>& dirty,
    const std::vector<std::optional<at::Tensor>>& raw,
    const c10::intrusive_ptr<torch::autograd::Node>& node, at::Tensor (*view)(const at::Tensor&)) {
  const auto no_jvp = [](auto, auto) -> std::vector<at::Tensor> {
    TORCH_INTERNAL_ASSERT(false, "a recorded call has no tangents");
  };
#ifdef HOTOP_TORCH_2_14
  c10::intrusive_ptr<torch::autograd::Node> attached;
  return torch::autograd::_wrap_outputs(inputs, non_differentiable, dirty, raw, node, no_jvp, {},
                                        view, false, attached);
#else
  return torch::autograd::_wrap_outputs(inputs, non_differentiable, dirty, raw, node, no_jvp, {},
                                        view, false);
#endif
}

// torch.autograd.graph.node_creation_hook, of 2.14: once per node, after Tensors were saved.
inline void announce_node([[maybe_unused]] const c10::intrusive_ptr<torch::autograd::Node>& node) {
#ifdef HOTOP_TORCH_2_14
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

// ctx.set_output_grad_dtype, of 2.14. False: an error is set.
inline bool declare_grad_dtypes([[maybe_unused]] THPFunction* ctx) {
#ifdef HOTOP_TORCH_2_14
  auto declared = PyRef::steal(std::exchange(ctx->output_grad_dtypes, nullptr));
  if (!declared) return true;
  auto& node = *ctx->cdata;
  const auto outputs = static_cast<Py_ssize_t>(node.num_inputs());
  if (!PyTuple_Check(declared.get())) {
    PyErr_Format(PyExc_RuntimeError,
                 "set_output_grad_dtype expects the declarations to be a tuple, but got: %s",
                 Py_TYPE(declared.get())->tp_name);
    return false;
  }
  if (PyTuple_GET_SIZE(declared.get()) != outputs) {
    PyErr_Format(PyExc_RuntimeError,
                 "set_output_grad_dtype expected the number of declarations to match the number "
                 "of outputs: the Function returned %zd values but %zd declarations were provided",
                 outputs, PyTuple_GET_SIZE(declared.get()));
    return false;
  }
  for (Py_ssize_t i = 0; i < outputs; ++i) {
    PyObject* dtype = PyTuple_GET_ITEM(declared.get(), i);
    const bool differentiable = !node.input_metadata(i).was_default_constructed();
    if (dtype != Py_None && !THPDtype_Check(dtype)) {
      PyErr_Format(PyExc_RuntimeError,
                   "set_output_grad_dtype expects each declaration to be a torch.dtype or None, "
                   "but got %s",
                   Py_TYPE(dtype)->tp_name);
      return false;
    }
    if (dtype != Py_None && !differentiable) {
      PyErr_Format(PyExc_RuntimeError,
                   "set_output_grad_dtype: got a concrete dtype for output %zd, but that output is "
                   "not a differentiable tensor (it is a non-tensor, was marked "
                   "non-differentiable, or has a non-differentiable dtype). Pass None for output "
                   "%zd instead.",
                   i, i);
      return false;
    }
    if (differentiable) {
      node.mutable_input_metadata(i).set_grad_dtype(
          dtype == Py_None ? std::nullopt
                           : std::optional(reinterpret_cast<THPDtype*>(dtype)->scalar_type));
    }
  }
#endif
  return true;
}

}  // namespace hotop
