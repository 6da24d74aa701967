// The operations on Tensors: checks, results, threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "isa.h"

namespace hotop::nvfp4 {

enum class Tactic { kAuto, kBlas, kBlasWide, kInt8, kInt8Wide, kScalar, kTrivial };

// Work above which a caller should let other Python threads run.
inline constexpr int64_t kReleaseGilFrom = 1 << 18;

// kernels == nullptr: zeros of the right shapes, nothing checked.
std::tuple<at::Tensor, at::Tensor> quantize(const Kernels* kernels, const at::Tensor& input,
                                            const at::Tensor& input_scale,
                                            int64_t scaling_vector_size,
                                            bool is_sf_swizzled_layout);

at::Tensor gemm(Tactic tactic, const at::Tensor& act_fp4, const at::Tensor& weight,
                const at::Tensor& act_sf, const at::Tensor& weight_scale, const at::Tensor& alpha,
                at::ScalarType output_dtype);

// [..., k] = (code * scale) * (1 / global_scale), in float32, then cast to dtype.
at::Tensor dequantize(const at::Tensor& packed, const at::Tensor& sf,
                      const at::Tensor& global_scale, at::ScalarType dtype,
                      bool is_sf_swizzled_layout);

// [m, columns] -> 1-D, padded with zeros, and back.
at::Tensor swizzle(const at::Tensor& sf);
at::Tensor unswizzle(const at::Tensor& sf, int64_t rows, int64_t columns);

}  // namespace hotop::nvfp4
