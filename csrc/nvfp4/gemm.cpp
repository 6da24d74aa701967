// The GEMM tactics on Tensors: out = cast(alpha * sum (e2m1_a * sf_a)(e2m1_w * sf_w)).
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/DimVector.h>

#include <cstdlib>
#include <memory>

#include "checks.h"
#include "ops.h"
#include "threads.h"

namespace hotop::nvfp4 {
namespace {

constexpr const char* kGemm = "nvfp4_gemm";
// Columns of one piece of work (weight rows made ready at a time), by tactic. Wide ones do fewer
// passes over the activations and leave the second-level cache.
constexpr int64_t kPanel = 32, kWidePanel = 256;
constexpr int64_t kBlasPanel = 64, kWideBlasPanel = 512;
constexpr int64_t kRowChunk = 64;           // rows; a chunk's results stay in the first-level cache
constexpr int64_t kSerialBelow = 1 << 21;   // products; smaller ones stay on one thread
constexpr int64_t kPrepareGrain = 1 << 16;  // elements of activations made ready in one piece

// Aligned memory for intermediate values; small amounts on the stack.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes <= static_cast<int64_t>(sizeof(near_))) {
      data_ = near_;
      return;
    }
    far_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, ceil_div(bytes, 64) * 64)));
    TORCH_CHECK(far_ != nullptr, kGemm, ": not enough memory for ", bytes, " bytes");
    data_ = far_.get();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  uint8_t* bytes() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  alignas(64) uint8_t near_[8192];
  std::unique_ptr<uint8_t, Free> far_;
  uint8_t* data_;
};

struct Problem {
  Rows act, weight;
  int64_t m, n, k;
  float alpha;
  Element type;
  char* out;

  int64_t element_size() const { return type == Element::kFloat32 ? 4 : 2; }
};

// Makes columns first..last of the output by chunks of rows: tile(first_row, Tile) writes
// float32, which is cast where the output has another type.
template <typename F>
void make_columns(const Kernels& kernels, const Problem& p, int64_t first, int64_t last,
                  const F& tile) {
  const int64_t columns = last - first;
  if (p.type == Element::kFloat32) {
    for (int64_t row = 0; row < p.m; row += kRowChunk) {
      float* out = reinterpret_cast<float*>(p.out) + row * p.n + first;
      tile(row, Tile{std::min(kRowChunk, p.m - row), columns, p.alpha, out, p.n});
    }
    return;
  }
  Scratch buffer(std::min(p.m, kRowChunk) * columns * 4);
  for (int64_t row = 0; row < p.m; row += kRowChunk) {
    const int64_t rows = std::min(kRowChunk, p.m - row);
    tile(row, Tile{rows, columns, p.alpha, buffer.floats(), columns});
    char* out = p.out + (row * p.n + first) * 2;
    if (columns == p.n) {
      kernels.narrow(buffer.floats(), rows * columns, p.type, out);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      kernels.narrow(buffer.floats() + r * columns, columns, p.type, out + r * p.n * 2);
    }
  }
}

// f(first, last) for panels of columns, on this thread where there is little to do.
template <typename F>
void for_panels(const Problem& p, int64_t panel, const F& f) {
  if (p.m * p.n * p.k >= kSerialBelow) {
    for_pieces(p.n, panel, f);
    return;
  }
  for (int64_t first = 0; first < p.n; first += panel) f(first, std::min(first + panel, p.n));
}

void gemm_scalar(const Kernels& kernels, const Problem& p) {
  for_panels(p, kPanel, [&](int64_t first, int64_t last) {
    make_columns(kernels, p, first, last, [&](int64_t row, const Tile& tile) {
      multiply_scalar(p.act, row, p.weight, first, tile);
    });
  });
}

void gemm_int8(const Kernels& kernels, const Problem& p, int64_t panel_columns) {
  const int64_t act_bytes = kernels.act_row_bytes(p.act.blocks);
  const int64_t weight_bytes = kernels.weight_row_bytes(p.act.blocks);
  Scratch scratch(p.m * act_bytes);
  for_pieces(p.m, std::max<int64_t>(1, kPrepareGrain / p.k), [&](int64_t first, int64_t last) {
    kernels.prepare_act(p.act, first, last, {scratch.bytes() + first * act_bytes, act_bytes});
  });
  for_panels(p, panel_columns, [&](int64_t first, int64_t last) {
    Scratch panel((last - first) * weight_bytes);
    const PreparedRows weight{panel.bytes(), weight_bytes};
    kernels.prepare_weight(p.weight, first, last, weight);
    make_columns(kernels, p, first, last, [&](int64_t row, const Tile& tile) {
      const PreparedRows act{scratch.bytes() + row * act_bytes, act_bytes};
      kernels.multiply_int8(act, weight, p.act.blocks, tile);
    });
  });
}

// product [m, n] = act [m, k] * weight [n, k]^T by PyTorch's own CPU kernel, past the dispatcher.
void multiply_blas(float* act, float* weight, int64_t m, int64_t n, int64_t k, float* product) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto options = at::TensorOptions().dtype(at::kFloat);
  at::Tensor out = at::from_blob(product, {m, n}, options);
  at::cpu::mm_out(out, at::from_blob(act, {m, k}, options),
                  at::from_blob(weight, {k, n}, {1, k}, options));
}

void gemm_blas(const Kernels& kernels, const Problem& p, int64_t panel_columns) {
  Scratch act(p.m * p.k * 4);
  for_pieces(p.m, std::max<int64_t>(1, kPrepareGrain / p.k), [&](int64_t first, int64_t last) {
    kernels.decode(p.act, first, last, 1.0f, act.floats() + first * p.k);
  });
  // Each panel is one call of BLAS on one thread, so the bits do not depend on their number.
  for_panels(p, panel_columns, [&](int64_t first, int64_t last) {
    const int64_t columns = last - first;
    Scratch panel(columns * p.k * 4);
    kernels.decode(p.weight, first, last, 1.0f, panel.floats());
    Scratch product(p.m * columns * 4);
    multiply_blas(act.floats(), panel.floats(), p.m, columns, p.k, product.floats());
    float* values = product.floats();
    for (int64_t i = 0; i < p.m * columns; ++i) values[i] *= p.alpha;
    for (int64_t row = 0; row < p.m; ++row) {
      kernels.narrow(values + row * columns, columns, p.type,
                     p.out + (row * p.n + first) * p.element_size());
    }
  });
}

// Measured: with AVX2 the integer tactic is the faster one at every size tried (m from 1 to 256, k
// from 32 to 2048); without it, BLAS is, save where a call is mostly overhead.
bool prefers_blas(const Kernels& kernels, const Problem& p) {
  return &kernels == &kScalarKernels && p.m * p.n * p.k > (1 << 12);
}

at::Tensor contiguous_bytes(const at::Tensor& tensor) {
  if (C10_LIKELY(tensor.is_contiguous())) return tensor;
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.contiguous();
}

const uint8_t* bytes_of(const at::Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

}  // namespace

at::Tensor gemm(Tactic tactic, const at::Tensor& act_fp4, const at::Tensor& weight,
                const at::Tensor& act_sf, const at::Tensor& weight_scale, const at::Tensor& alpha,
                at::ScalarType output_dtype) {
  if (tactic == Tactic::kTrivial) {
    c10::DimVector sizes(act_fp4.sizes().begin(), act_fp4.sizes().end());
    sizes.back() = weight.sizes()[0];
    at::Tensor result(at::detail::empty_cpu(sizes, output_dtype));
    std::memset(result.mutable_data_ptr(), 0, result.nbytes());
    return result;
  }
  check_bytes(kGemm, "act_fp4", act_fp4);
  check_bytes(kGemm, "weight", weight);
  TORCH_CHECK_VALUE(act_fp4.dim() > 0, kGemm,
                    ": act_fp4 must have at least one dimension, got none");
  TORCH_CHECK_VALUE(weight.dim() == 2, kGemm, ": weight must have two dimensions, got ",
                    weight.dim());
  const int64_t bytes = act_fp4.sizes().back();
  const int64_t n = weight.sizes()[0];
  TORCH_CHECK_VALUE(weight.sizes()[1] == bytes, kGemm, ": weight must have ", bytes,
                    " bytes in a row as act_fp4 has, got ", weight.sizes()[1]);
  TORCH_CHECK_VALUE(bytes % 8 == 0, kGemm,
                    ": the last dimension of act_fp4 must be a multiple of 8, got ", bytes);
  int64_t m = 1;
  for (int64_t i = 0; i + 1 < act_fp4.dim(); ++i) m *= act_fp4.sizes()[i];
  const int64_t blocks = bytes / 8;
  check_swizzled(kGemm, "act_sf", act_sf, m, blocks);
  check_swizzled(kGemm, "weight_scale", weight_scale, n, blocks);
  const float alpha_value = scalar_of(kGemm, "alpha", alpha);
  const Element type = element_of(kGemm, "output_dtype", output_dtype);

  c10::DimVector sizes(act_fp4.sizes().begin(), act_fp4.sizes().end());
  sizes.back() = n;
  at::Tensor result(at::detail::empty_cpu(sizes, output_dtype));
  if (m == 0 || n == 0) return result;
  const at::Tensor a = contiguous_bytes(act_fp4), w = contiguous_bytes(weight);
  const at::Tensor a_sf = contiguous_bytes(act_sf), w_sf = contiguous_bytes(weight_scale);
  const Problem problem{{bytes_of(a), bytes_of(a_sf), blocks, true},
                        {bytes_of(w), bytes_of(w_sf), blocks, true},
                        m,
                        n,
                        blocks * kBlock,
                        alpha_value,
                        type,
                        static_cast<char*>(result.mutable_data_ptr())};
  const Kernels& kernels = active_kernels();
  DefaultFloatState state;
  if (tactic == Tactic::kAuto) {
    tactic = prefers_blas(kernels, problem) ? Tactic::kBlas : Tactic::kInt8;
  }
  if (tactic == Tactic::kScalar || blocks == 0) {
    gemm_scalar(kScalarKernels, problem);
  } else if (tactic == Tactic::kBlas || tactic == Tactic::kBlasWide) {
    gemm_blas(kernels, problem, tactic == Tactic::kBlas ? kBlasPanel : kWideBlasPanel);
  } else {
    gemm_int8(kernels, problem, tactic == Tactic::kInt8 ? kPanel : kWidePanel);
  }
  return result;
}

}  // namespace hotop::nvfp4
