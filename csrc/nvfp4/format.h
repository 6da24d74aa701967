// The NVFP4 format, one value at a time: e2m1 and e4m3 codecs, the scale layout, narrow floats.
//
// Everything is in an anonymous namespace: files compiled for AVX include this header too, and the
// linker must not give their copies to a machine without AVX.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace hotop::nvfp4 {
namespace {

constexpr int64_t kBlock = 16;                // elements that share a scale
constexpr float kMaxE4M3 = 448.0f;            // 0x7E
constexpr uint32_t kInfBits = 0x7F800000u;    // of float32
constexpr uint32_t kAbsMask = 0x7FFFFFFFu;    // of float32
constexpr uint32_t kSixthBits = 0x3E2AAAABu;  // 1/6 rounded to float32

constexpr uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
constexpr float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

constexpr bool is_nan_bits(uint32_t bits) { return (bits & kAbsMask) > kInfBits; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where the scale of row r and column c lies when rows are padded to 128 and columns to 4.
// Unsigned: divisions are shifts.
inline int64_t swizzled_offset(uint64_t row, uint64_t column, uint64_t tiles) {
  return static_cast<int64_t>(((row / 128) * tiles + column / 4) * 512 + (row % 32) * 16 +
                              ((row % 128) / 32) * 4 + column % 4);
}

inline float e2m1_to_float(uint32_t code) {
  constexpr float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = magnitudes[code & 7];
  return code & 8 ? -magnitude : magnitude;
}

// Nearest even; ties go to the even code. NaN gives +6.
inline uint32_t float_to_e2m1(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return 7;
  const float y = std::fabs(value);
  uint32_t code;
  if (y <= 0.25f) {
    code = 0;
  } else if (y < 0.75f) {
    code = 1;
  } else if (y <= 1.25f) {
    code = 2;
  } else if (y < 1.75f) {
    code = 3;
  } else if (y <= 2.5f) {
    code = 4;
  } else if (y < 3.5f) {
    code = 5;
  } else {
    code = y <= 5.0f ? 6 : 7;
  }
  return code | (bits >> 31 << 3);
}

// All 256 values of e4m3. A constant, so that no start-up code runs in files compiled for AVX.
constexpr std::array<float, 256> kE4M3 = [] {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t magnitude = code & 0x7F;
    float value;
    if (magnitude == 0x7F) {
      value = float_of(0x7FC00000u);
    } else if (magnitude < 8) {
      value = static_cast<float>(magnitude) * 0.001953125f;  // subnormal: steps of 2^-9
    } else {
      value = float_of((magnitude << 20) + (120u << 23));
    }
    values[code] = float_of(bits_of(value) | (code & 0x80) << 24);
  }
  return values;
}();

inline float e4m3_to_float(uint8_t code) { return kE4M3[code]; }

// Nearest even, saturates at 448, subnormals kept, NaN gives 0x7F, the sign of zero kept.
inline uint8_t float_to_e4m3(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return 0x7F;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  float y = std::fabs(value);
  if (y > kMaxE4M3) y = kMaxE4M3;
  uint32_t code;
  if (y < 0.015625f) {
    // Adding 2^23 leaves no bit below 1, so the addition rounds to nearest even.
    code = bits_of(y * 512.0f + 8388608.0f) & 0xF;
  } else {
    const uint32_t b = bits_of(y);
    code = (b + 0x7FFFF + (b >> 20 & 1)) >> 20;
    code -= 120u << 3;
  }
  return static_cast<uint8_t>(code) | sign;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7FFF;
  if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000u | magnitude << 13);
  if (magnitude < 0x0400) {
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    return float_of(bits_of(value) | sign);
  }
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

inline float bfloat16_to_float(uint16_t bits) {
  return float_of(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & kAbsMask;
  if (magnitude > kInfBits) return sign | 0x7E00 | static_cast<uint16_t>(magnitude >> 13 & 0x1FF);
  if (magnitude >= 0x477FF000u) return sign | 0x7C00;  // 65520 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 rounds at the last place of half's subnormals, 2^-24.
    const float rounded = float_of(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bits_of(rounded) - 0x3F000000u);
  }
  return sign |
         static_cast<uint16_t>((magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace
}  // namespace hotop::nvfp4
