// Quantization, dequantization and the scale layouts on Tensors.
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/contiguous.h>
#include <c10/util/DimVector.h>

#include <cmath>

#include "checks.h"
#include "threads.h"

namespace hotop::nvfp4 {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements of one piece; smaller inputs stay on one thread

at::Tensor contiguous(const at::Tensor& tensor) {
  if (C10_LIKELY(tensor.is_contiguous())) return tensor;
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.contiguous();
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

c10::DimVector with_last(at::IntArrayRef sizes, int64_t last) {
  c10::DimVector result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// The distance of rows in elements when [..., k] is [m, k] without a copy; -1 when it is not.
int64_t row_stride(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return -1;
  int64_t stride = -1, rows = 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (stride == -1) {
      stride = strides[i];
    } else if (strides[i] != stride * rows) {
      return -1;
    }
    rows *= sizes[i];
  }
  return stride == -1 ? sizes[last] : stride;
}

int64_t rows_of(const at::Tensor& tensor) {
  int64_t rows = 1;
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

void* data_of(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }

std::tuple<at::Tensor, at::Tensor> quantize_results(const at::Tensor& input, int64_t rows,
                                                    int64_t blocks, bool swizzled) {
  at::Tensor packed = empty(with_last(input.sizes(), blocks * 8), at::kByte);
  at::Tensor scales = swizzled ? empty({swizzled_size(rows, blocks)}, at::kByte)
                               : empty(with_last(input.sizes(), blocks), at::kByte);
  return {std::move(packed), std::move(scales)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> quantize(const Kernels* kernels, const at::Tensor& input,
                                            const at::Tensor& input_scale,
                                            int64_t scaling_vector_size,
                                            bool is_sf_swizzled_layout) {
  constexpr const char* op = "tunable_fp4_quantize";
  if (kernels == nullptr) {
    const int64_t blocks = input.sizes().back() / kBlock;
    auto results = quantize_results(input, rows_of(input), blocks, is_sf_swizzled_layout);
    std::memset(data_of(std::get<0>(results)), 0, std::get<0>(results).numel());
    std::memset(data_of(std::get<1>(results)), 0, std::get<1>(results).numel());
    return results;
  }
  check_plain(op, "input", input);
  const Element type = element_of(op, "input", input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() > 0, op, ": input must have at least one dimension, got none");
  const int64_t k = input.sizes().back();
  TORCH_CHECK_VALUE(k % kBlock == 0, op, ": the last dimension of input must be a multiple of ",
                    kBlock, ", got ", k);
  const float global_scale = scalar_of(op, "input_scale", input_scale);
  TORCH_CHECK_VALUE(scaling_vector_size == kBlock, op, ": scaling_vector_size must be ", kBlock,
                    ", got ", scaling_vector_size);

  const int64_t rows = rows_of(input);
  const int64_t blocks = k / kBlock;
  at::Tensor source = input;
  int64_t stride = k;
  if (!input.is_contiguous()) {
    stride = row_stride(input);
    if (stride == -1) {
      source = contiguous(input);
      stride = k;
    }
  }
  auto results = quantize_results(input, rows, blocks, is_sf_swizzled_layout);
  auto* scales = static_cast<uint8_t*>(data_of(std::get<1>(results)));
  if (is_sf_swizzled_layout && (rows % 128 != 0 || blocks % 4 != 0)) {
    std::memset(scales, 0, std::get<1>(results).numel());
  }
  if (rows == 0 || blocks == 0) return results;
  const QuantizeJob job{source.const_data_ptr(),
                        stride,
                        blocks,
                        global_scale,
                        static_cast<uint8_t*>(data_of(std::get<0>(results))),
                        scales,
                        is_sf_swizzled_layout};
  const auto kernel = kernels->quantize[static_cast<int>(type)];
  DefaultFloatState state;
  for_pieces(rows, std::max<int64_t>(1, kGrain / k),
             [&](int64_t first, int64_t last) { kernel(job, first, last); });
  return results;
}

at::Tensor dequantize(const at::Tensor& packed, const at::Tensor& sf,
                      const at::Tensor& global_scale, at::ScalarType dtype,
                      bool is_sf_swizzled_layout) {
  constexpr const char* op = "nvfp4_dequantize";
  check_bytes(op, "packed", packed);
  TORCH_CHECK_VALUE(packed.dim() > 0, op, ": packed must have at least one dimension, got none");
  const int64_t bytes = packed.sizes().back();
  TORCH_CHECK_VALUE(bytes % 8 == 0, op,
                    ": the last dimension of packed must be a multiple of 8, got ", bytes);
  const int64_t rows = rows_of(packed);
  const int64_t blocks = bytes / 8;
  if (is_sf_swizzled_layout) {
    check_swizzled(op, "sf", sf, rows, blocks);
  } else {
    check_bytes(op, "sf", sf);
    TORCH_CHECK_VALUE(sf.sizes() == with_last(packed.sizes(), blocks), op,
                      ": sf must have the size ",
                      at::IntArrayRef(with_last(packed.sizes(), blocks)), ", got ", sf.sizes());
  }
  const float g = scalar_of(op, "global_scale", global_scale);
  const Element type = element_of(op, "dtype", dtype);
  const at::Tensor codes = contiguous(packed);
  const at::Tensor scales = contiguous(sf);
  at::Tensor result = empty(with_last(packed.sizes(), blocks * kBlock), dtype);
  if (result.numel() == 0) return result;
  const Rows source{static_cast<const uint8_t*>(codes.const_data_ptr()),
                    static_cast<const uint8_t*>(scales.const_data_ptr()), blocks,
                    is_sf_swizzled_layout};
  const int64_t k = blocks * kBlock;
  const Kernels& kernels = active_kernels();
  auto* out = static_cast<char*>(data_of(result));
  DefaultFloatState state;
  const float multiplier = 1.0f / g;
  const auto decode = [&](int64_t first, int64_t last, float* values) {
    if (C10_LIKELY(std::isfinite(multiplier))) {
      kernels.decode(source, first, last, g, values);
      return;
    }
    // What is 0 before the global scale stays 0, where the kernels would multiply it by infinity.
    kernels.decode(source, first, last, 1.0f, values);
    for (int64_t i = 0; i < (last - first) * k; ++i) {
      if (values[i] != 0.0f) values[i] *= multiplier;
    }
  };
  for_pieces(rows, std::max<int64_t>(1, kGrain / k), [&](int64_t first, int64_t last) {
    if (type == Element::kFloat32) {
      decode(first, last, reinterpret_cast<float*>(out) + first * k);
      return;
    }
    std::vector<float> row(k);
    for (int64_t i = first; i < last; ++i) {
      decode(i, i + 1, row.data());
      kernels.narrow(row.data(), k, type, out + i * k * 2);
    }
  });
  return result;
}

at::Tensor swizzle(const at::Tensor& sf) {
  check_bytes("swizzle", "sf", sf);
  TORCH_CHECK_VALUE(sf.dim() == 2, "swizzle: sf must have two dimensions, got ", sf.dim());
  const int64_t rows = sf.size(0), columns = sf.size(1), tiles = ceil_div(columns, 4);
  const at::Tensor source = contiguous(sf);
  at::Tensor result = empty({swizzled_size(rows, columns)}, at::kByte);
  const auto* in = static_cast<const uint8_t*>(source.const_data_ptr());
  auto* out = static_cast<uint8_t*>(data_of(result));
  if (result.numel() != 0) std::memset(out, 0, result.numel());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) out[swizzled_offset(r, c, tiles)] = in[r * columns + c];
  }
  return result;
}

at::Tensor unswizzle(const at::Tensor& sf, int64_t rows, int64_t columns) {
  TORCH_CHECK_VALUE(rows >= 0, "unswizzle: rows must not be negative, got ", rows);
  TORCH_CHECK_VALUE(columns >= 0, "unswizzle: columns must not be negative, got ", columns);
  check_swizzled("unswizzle", "sf", sf, rows, columns);
  const int64_t tiles = ceil_div(columns, 4);
  const at::Tensor source = contiguous(sf);
  at::Tensor result = empty({rows, columns}, at::kByte);
  const auto* in = static_cast<const uint8_t*>(source.const_data_ptr());
  auto* out = static_cast<uint8_t*>(data_of(result));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) out[r * columns + c] = in[swizzled_offset(r, c, tiles)];
  }
  return result;
}

}  // namespace hotop::nvfp4
