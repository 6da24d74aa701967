// Argument checks of the operations; texts in PyTorch's manner: what was expected, what was got.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include "format.h"

namespace hotop::nvfp4 {

// Only storage of the CPU may be read: no fake, functorch, sparse or lazily negated Tensor.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const uint64_t allowed =
      (c10::DispatchKeySet(DispatchKey::CPU) | c10::DispatchKeySet(DispatchKey::AutogradCPU) |
       c10::DispatchKeySet(DispatchKey::ADInplaceOrView) |
       c10::DispatchKeySet(DispatchKey::AutocastCPU))
          .raw_repr();
  const uint64_t keys = tensor.key_set().raw_repr();
  return (keys & ~allowed) == 0 && tensor.defined();
}

[[noreturn]] inline void fail_plain(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": ", name, " must be a Tensor, got an undefined Tensor");
  TORCH_CHECK(tensor.device().is_cpu(), op, ": ", name, " must be on the CPU, got a Tensor on ",
              tensor.device());
  TORCH_CHECK(false, op, ": ", name,
              " must be a plain strided Tensor with storage, got a Tensor with the dispatch keys ",
              tensor.key_set());
}

inline void check_plain(const char* op, const char* name, const at::Tensor& tensor) {
  if (C10_UNLIKELY(!is_plain(tensor))) fail_plain(op, name, tensor);
}

inline void check_bytes(const char* op, const char* name, const at::Tensor& tensor) {
  check_plain(op, name, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, op, ": ", name, " must be uint8, got ",
                   tensor.scalar_type());
}

inline float scalar_of(const char* op, const char* name, const at::Tensor& tensor) {
  check_plain(op, name, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, op, ": ", name, " must be float32, got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.numel() == 1, op, ": ", name, " must have one element, got ",
                    tensor.numel());
  return *static_cast<const float*>(tensor.const_data_ptr());
}

inline Element element_of(const char* op, const char* name, at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return Element::kBFloat16;
  if (dtype == at::kFloat) return Element::kFloat32;
  TORCH_CHECK_TYPE(dtype == at::kHalf, op, ": ", name,
                   " must be float32, bfloat16 or float16, got ", dtype);
  return Element::kFloat16;
}

inline int64_t swizzled_size(int64_t rows, int64_t columns) {
  return ceil_div(rows, 128) * ceil_div(columns, 4) * 512;
}

inline void check_swizzled(const char* op, const char* name, const at::Tensor& sf, int64_t rows,
                           int64_t columns) {
  check_bytes(op, name, sf);
  const int64_t expected = swizzled_size(rows, columns);
  TORCH_CHECK_VALUE(sf.dim() == 1 && sf.numel() == expected, op, ": ", name, " must be 1-D with ",
                    expected, " elements (the swizzled scales of ", rows, " x ", columns,
                    " blocks), got size ", sf.sizes());
}

}  // namespace hotop::nvfp4
