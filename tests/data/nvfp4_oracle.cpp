// NVFP4 by the host code of NVIDIA's cuda_fp4.h and cuda_fp8.h: what hotop's kernels must equal.
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace {

uint8_t to_e4m3(float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }

uint8_t to_e2m1(float value) {
  return __nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest) & 0xF;
}

float from_e4m3(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

float from_e2m1(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
}

}  // namespace

extern "C" {

void encode_e4m3(const float* input, int64_t size, uint8_t* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = to_e4m3(input[i]);
}

void encode_e2m1(const float* input, int64_t size, uint8_t* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = to_e2m1(input[i]);
}

void decode_e4m3(const uint8_t* input, int64_t size, float* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = from_e4m3(input[i]);
}

void decode_e2m1(const uint8_t* input, int64_t size, float* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = from_e2m1(input[i]);
}

// `blocks` blocks of 16; sf holds one byte a block, packed eight.
void quantize(const float* input, int64_t blocks, float g, uint8_t* packed, uint8_t* sf) {
  for (int64_t block = 0; block < blocks; ++block) {
    const float* x = input + 16 * block;
    float amax = std::numeric_limits<float>::quiet_NaN();
    // Not std::fmax: glibc's gives NaN beside a signaling NaN, a GPU's ignores that one as well.
    for (int i = 0; i < 16; ++i)
      if (!std::isnan(x[i]) && !(amax >= std::fabs(x[i]))) amax = std::fabs(x[i]);
    sf[block] = to_e4m3(g * (amax * (1.0f / 6.0f)));
    const float sf_value = from_e4m3(sf[block]);
    const float scale = sf_value == 0.0f ? 0.0f : 1.0f / (sf_value * (1.0f / g));
    for (int i = 0; i < 8; ++i)
      packed[8 * block + i] =
          static_cast<uint8_t>(to_e2m1(x[2 * i] * scale) | to_e2m1(x[2 * i + 1] * scale) << 4);
  }
}

// The bytes [..., 2j + 1 | 2j] and one scale a block to float32: (code * float(sf)) * (1/g).
void dequantize(const uint8_t* packed, const uint8_t* sf, int64_t blocks, float g, float* result) {
  for (int64_t i = 0; i < 16 * blocks; ++i) {
    const uint8_t code = i % 2 == 0 ? packed[i / 2] & 0xF : packed[i / 2] >> 4;
    result[i] = (from_e2m1(code) * from_e4m3(sf[i / 16])) * (1.0f / g);
  }
}

}  // extern "C"
