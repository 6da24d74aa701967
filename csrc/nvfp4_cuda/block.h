// One NVFP4 block: 16 floats to 8 bytes and a scale, for the GPU and, so that it can be tested
// without one, for the host. Not yet run on hardware.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define HOTOP_HOST_DEVICE __host__ __device__ inline
#if CUDART_VERSION >= 12080
#include <cuda_fp4.h>
#endif
#if CUDART_VERSION >= 11080
#include <cuda_fp8.h>
#endif
#else
#define HOTOP_HOST_DEVICE inline
#endif

// cvt.rn.satfinite.e2m1x2.f32 exists for architecture- and family-specific targets only (sm_100a,
// sm_100f, sm_103a, sm_120a, ...); for plain sm_100 cuda_fp4.h emulates it in double precision.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && CUDART_VERSION >= 12080 && \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__) || \
     defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL))
#define HOTOP_HAS_E2M1_CVT 1
#else
#define HOTOP_HAS_E2M1_CVT 0
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && CUDART_VERSION >= 11080
#define HOTOP_HAS_E4M3_CVT 1
#else
#define HOTOP_HAS_E4M3_CVT 0
#endif

namespace hotop_nvfp4_cuda {

constexpr int kBlock = 16;

HOTOP_HOST_DEVICE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

HOTOP_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Exact on purpose. NVIDIA's own kernels take rcp.approx.ftz here, whose last bit is not specified
// and differs between GPUs; with it no CPU and no second GPU could promise the same bytes, and on a
// power-of-two global scale up to 0.6 % of the codes would differ. Two exact reciprocals a block
// cost nothing beside the block's memory traffic.
HOTOP_HOST_DEVICE float reciprocal(float value) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(value);
#else
  return 1.0f / value;
#endif
}

// float32 to e4m3: nearest even, saturating at 448, NaN to 0x7F.
HOTOP_HOST_DEVICE uint8_t encode_e4m3(float value) {
#if HOTOP_HAS_E4M3_CVT
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448
  uint32_t code;
  if (magnitude < 0x3C800000u) {
    // Below 2^-6 the step is 2^-9, which is the last bit of a float near 2^14: the sum rounds.
    code = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  } else {
    const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
    code = (rounded >> 20) - ((127u - 7u) << 3);
  }
  return static_cast<uint8_t>(sign | code);
#endif
}

HOTOP_HOST_DEVICE float decode_e4m3(uint8_t code) {
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t exponent = code >> 3 & 0xFu;
  const uint32_t mantissa = code & 7u;
  if ((code & 0x7Fu) == 0x7Fu) return float_of(sign | 0x7FC00000u);
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0.001953125f));
  return float_of(sign | (exponent + 120u) << 23 | mantissa << 20);
}

// float32 to e2m1: nearest, ties to the even code, saturating at 6, NaN to +6.
HOTOP_HOST_DEVICE uint32_t encode_e2m1(float value) {
  const uint32_t bits = bits_of(value);
  const float y = float_of(bits & 0x7FFFFFFFu);
  if (y != y) return 7;
  const uint32_t code = uint32_t{y > 0.25f} + uint32_t{y >= 0.75f} + uint32_t{y > 1.25f} +
                        uint32_t{y >= 1.75f} + uint32_t{y > 2.5f} + uint32_t{y >= 3.5f} +
                        uint32_t{y > 5.0f};
  return code | (bits >> 28 & 8u);
}

// Two codes to a byte, `low` in the low nibble.
HOTOP_HOST_DEVICE uint32_t encode_e2m1_pair(float low, float high) {
#if HOTOP_HAS_E2M1_CVT
  return __nv_cvt_float2_to_fp4x2(make_float2(low, high), __NV_E2M1, cudaRoundNearest);
#else
  return encode_e2m1(low) | encode_e2m1(high) << 4;
#endif
}

struct QuantizedBlock {
  uint64_t codes;  // element i in bits 4i..4i+3: the eight bytes in memory order
  uint8_t sf;
};

// The rule of src/hotop/nvfp4/reference.py, operation by operation. Must be compiled without
// flush-to-zero.
HOTOP_HOST_DEVICE QuantizedBlock quantize_block(const float (&x)[kBlock], float g) {
  // A NaN fails every comparison, so it is passed over; `found` tells an all-NaN block.
  float amax = 0.0f;
  bool found = false;
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = float_of(bits_of(x[i]) & 0x7FFFFFFFu);
    found |= magnitude >= 0.0f;
    if (magnitude > amax) amax = magnitude;
  }
  if (!found) amax = float_of(0x7FC00000u);

  QuantizedBlock result;
  result.sf = encode_e4m3(g * (amax * (1.0f / 6.0f)));
  const float sf = decode_e4m3(result.sf);
  const float scale = sf == 0.0f ? 0.0f : reciprocal(sf * reciprocal(g));
  result.codes = 0;
  for (int i = 0; i < kBlock; i += 2) {
    const uint32_t pair = encode_e2m1_pair(x[i] * scale, x[i + 1] * scale);
    result.codes |= static_cast<uint64_t>(pair & 0xFFu) << (4 * i);
  }
  return result;
}

// Where tensor cores read the scale of a row and a column (a block of the row) of
// `columns` columns: the 1-D block scaling layout in the documentation of cuBLAS.
HOTOP_HOST_DEVICE int64_t swizzled_offset(int64_t row, int64_t column, int64_t columns) {
  const int64_t tiles = (columns + 3) / 4;
  return ((row / 128) * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

}  // namespace hotop_nvfp4_cuda
