// Everything that differs between PyTorch versions, and the private members that hotop reads.
//
// The dispatcher's table of an operator is private. Naming a private member in an explicit
// instantiation is legal C++, so a PyTorch that renames one fails to compile here, and only here.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <memory>
#include <vector>

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

// The torch function modes of a thread, the innermost last.
inline const FunctionModes& function_modes(const at::impl::PythonTorchFunctionTLS& state) {
  return state.*reach(detail::ModesTag{});
}

inline bool has_tangent(const c10::AutogradMetaInterface* meta) {
  // The holder stays when its dual level is left; then it is empty.
  const auto& holder = static_cast<const torch::autograd::AutogradMeta*>(meta)->fw_grad_;
  return holder != nullptr && !holder->empty();
}

}  // namespace hotop
