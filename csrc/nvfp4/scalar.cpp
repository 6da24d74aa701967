// The scalar kernels: the rules as they are written, and what every machine can run.
#include <cstring>

#include "format.h"
#include "kernels.h"

namespace hotop::nvfp4 {
namespace {

struct Float32 {
  using Storage = float;
  static float load(const float* p) { return *p; }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float load(const uint16_t* p) { return bfloat16_to_float(*p); }
};
struct Float16 {
  using Storage = uint16_t;
  static float load(const uint16_t* p) { return half_to_float(*p); }
};

// Quantizes one block; returns its scale.
uint8_t quantize_block(const float* x, float g, float inverse_g, uint8_t* packed) {
  float amax = std::fabs(x[0]);
  for (int i = 1; i < kBlock; ++i) {
    const float y = std::fabs(x[i]);
    // A NaN beside numbers is ignored; a block of NaNs keeps it.
    if (y > amax || is_nan_bits(bits_of(amax))) amax = y;
  }
  const uint8_t sf = float_to_e4m3(g * (amax * float_of(kSixthBits)));
  const float scale = (sf & 0x7F) == 0 ? 0.0f : 1.0f / (e4m3_to_float(sf) * inverse_g);
  for (int i = 0; i < kBlock; i += 2) {
    packed[i / 2] =
        static_cast<uint8_t>(float_to_e2m1(x[i] * scale) | float_to_e2m1(x[i + 1] * scale) << 4);
  }
  return sf;
}

template <typename Type>
uint8_t quantize_block_at(const void* input, int64_t offset, float g, float inverse_g,
                          uint8_t* packed) {
  const auto* p = static_cast<const typename Type::Storage*>(input) + offset;
  float x[kBlock];
  for (int i = 0; i < kBlock; ++i) x[i] = Type::load(p + i);
  return quantize_block(x, g, inverse_g, packed);
}

template <typename Type>
void quantize(const QuantizeJob& job, int64_t first, int64_t last) {
  const int64_t tiles = ceil_div(job.blocks, 4);
  const float inverse_g = 1.0f / job.global_scale;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t column = 0; column < job.blocks; ++column) {
      const int64_t block = row * job.blocks + column;
      const int64_t offset = job.swizzled ? swizzled_offset(row, column, tiles) : block;
      job.scales[offset] =
          quantize_block_at<Type>(job.input, row * job.row_stride + column * kBlock,
                                  job.global_scale, inverse_g, job.packed + block * 8);
    }
  }
}

uint8_t scale_at(const Rows& rows, int64_t row, int64_t column) {
  return rows.scales[rows.swizzled ? swizzled_offset(row, column, ceil_div(rows.blocks, 4))
                                   : row * rows.blocks + column];
}

void decode_block(const uint8_t* packed, float scale, float multiplier, float* out) {
  for (int i = 0; i < kBlock / 2; ++i) {
    out[2 * i] = e2m1_to_float(packed[i]) * scale * multiplier;
    out[2 * i + 1] = e2m1_to_float(packed[i] >> 4) * scale * multiplier;
  }
}

void decode(const Rows& rows, int64_t first, int64_t last, float global_scale, float* out) {
  const float multiplier = 1.0f / global_scale;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t column = 0; column < rows.blocks; ++column) {
      decode_block(rows.packed + (row * rows.blocks + column) * 8,
                   e4m3_to_float(scale_at(rows, row, column)), multiplier, out);
      out += kBlock;
    }
  }
}

// A prepared row is its k codes doubled (int8), then its k/16 scales (float32).
int64_t prepared_row_bytes(int64_t blocks) { return blocks * (kBlock + 4); }

int8_t doubled(uint32_t code) { return static_cast<int8_t>(2.0f * e2m1_to_float(code)); }

void prepare(const Rows& rows, int64_t first, int64_t last, const PreparedRows& prepared) {
  for (int64_t row = first; row < last; ++row) {
    auto* codes = reinterpret_cast<int8_t*>(prepared.data + (row - first) * prepared.row_bytes);
    uint8_t* scales = prepared.data + (row - first) * prepared.row_bytes + rows.blocks * kBlock;
    const uint8_t* packed = rows.packed + row * rows.blocks * 8;
    for (int64_t i = 0; i < rows.blocks * 8; ++i) {
      codes[2 * i] = doubled(packed[i]);
      codes[2 * i + 1] = doubled(packed[i] >> 4);
    }
    for (int64_t i = 0; i < rows.blocks; ++i) {
      const float scale = e4m3_to_float(scale_at(rows, row, i));
      std::memcpy(scales + i * 4, &scale, 4);
    }
  }
}

void multiply_int8(const PreparedRows& act, const PreparedRows& weight, int64_t blocks,
                   const Tile& tile) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const auto* a = reinterpret_cast<const int8_t*>(act.data + row * act.row_bytes);
    for (int64_t column = 0; column < tile.columns; ++column) {
      const auto* w = reinterpret_cast<const int8_t*>(weight.data + column * weight.row_bytes);
      float total = 0.0f;
      for (int64_t block = 0; block < blocks; ++block) {
        int32_t sum = 0;
        for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) sum += a[i] * w[i];
        float a_scale, w_scale;
        std::memcpy(&a_scale, a + blocks * kBlock + block * 4, 4);
        std::memcpy(&w_scale, w + blocks * kBlock + block * 4, 4);
        total += static_cast<float>(sum) * (a_scale * w_scale);
      }
      // The codes were doubled on both sides.
      tile.out[row * tile.out_stride + column] = tile.scale * (0.25f * total);
    }
  }
}

void narrow(const float* in, int64_t count, Element type, void* out) {
  if (type == Element::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (type == Element::kBFloat16) {
    auto* halves = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) halves[i] = float_to_bfloat16(in[i]);
  } else {
    auto* halves = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) halves[i] = float_to_half(in[i]);
  }
}

}  // namespace

const Kernels kScalarKernels = {"scalar",
                                {quantize<Float32>, quantize<BFloat16>, quantize<Float16>},
                                decode,
                                prepared_row_bytes,
                                prepared_row_bytes,
                                prepare,
                                prepare,
                                multiply_int8,
                                narrow};

void quantize_blocks_scalar(Element type, const void* input, int64_t blocks, float global_scale,
                            uint8_t* packed, uint8_t* scales) {
  const auto quantize_at = type == Element::kFloat32    ? quantize_block_at<Float32>
                           : type == Element::kBFloat16 ? quantize_block_at<BFloat16>
                                                        : quantize_block_at<Float16>;
  const float inverse_g = 1.0f / global_scale;
  for (int64_t i = 0; i < blocks; ++i) {
    scales[i] = quantize_at(input, i * kBlock, global_scale, inverse_g, packed + i * 8);
  }
}

void multiply_scalar(const Rows& act, int64_t first_row, const Rows& weight, int64_t first_column,
                     const Tile& tile) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t act_row = first_row + row;
    for (int64_t column = 0; column < tile.columns; ++column) {
      const int64_t weight_row = first_column + column;
      float sum = 0.0f;
      for (int64_t block = 0; block < act.blocks; ++block) {
        float a[kBlock], w[kBlock];
        decode_block(act.packed + (act_row * act.blocks + block) * 8,
                     e4m3_to_float(scale_at(act, act_row, block)), 1.0f, a);
        decode_block(weight.packed + (weight_row * weight.blocks + block) * 8,
                     e4m3_to_float(scale_at(weight, weight_row, block)), 1.0f, w);
        for (int i = 0; i < kBlock; ++i) sum += a[i] * w[i];
      }
      tile.out[row * tile.out_stride + column] = tile.scale * sum;
    }
  }
}

}  // namespace hotop::nvfp4
