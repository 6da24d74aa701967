// Quantization with AVX2: eight blocks (128 elements) at a time.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "avx2.h"
#include "format.h"
#include "quantize_rows.h"

namespace hotop::nvfp4 {
// The fast road is one loop without calls; the compiler would not inline all of it by itself.
#define HOTOP_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kGroup = 8;  // blocks
constexpr int kWide = 4;   // groups whose scales are made together

// A block's elements at even and at odd places, |x| as float32: the two nibbles of a byte.
// `signs` has the sign of each in bit 15 of its own 16-bit place.
struct Halves {
  __m256 even, odd;
  __m256i signs;
};

HOTOP_INLINE __m256i max_of_pairs16(__m256i a, __m256i b) {
  return _mm256_max_epi16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
}
HOTOP_INLINE __m256i max_of_pairs32(__m256i a, __m256i b) {
  return _mm256_max_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
HOTOP_INLINE __m256i max_of_pairs64(__m256i a, __m256i b) {
  return _mm256_max_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// Greatest |x| of each of eight blocks of 16-bit floats. As integers, so a NaN is the greatest.
HOTOP_INLINE __m128i amax16(const uint16_t* input) {
  __m256i x[kGroup];
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  for (int i = 0; i < kGroup; ++i) {
    const auto* p = reinterpret_cast<const __m256i*>(input + i * kBlock);
    x[i] = _mm256_and_si256(_mm256_loadu_si256(p), mask);
  }
  const __m256i a = max_of_pairs32(max_of_pairs16(x[0], x[1]), max_of_pairs16(x[2], x[3]));
  const __m256i b = max_of_pairs32(max_of_pairs16(x[4], x[5]), max_of_pairs16(x[6], x[7]));
  const __m256i c = max_of_pairs64(a, b);
  return _mm_max_epi16(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr Element element = Element::kBFloat16;
  HOTOP_INLINE static __m256 amax(const uint16_t* input) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(amax16(input)), 16));
  }
  HOTOP_INLINE static Halves load(const uint16_t* input) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(input));
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    const __m256i odd = _mm256_and_si256(magnitude, _mm256_set1_epi32(0x7FFF0000));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16)), _mm256_castsi256_ps(odd), x};
  }
  static __m256i order(__m256i bytes) { return bytes; }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr Element element = Element::kFloat16;
  HOTOP_INLINE static __m256 amax(const uint16_t* input) { return _mm256_cvtph_ps(amax16(input)); }
  HOTOP_INLINE static Halves load(const uint16_t* input) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(input));
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    const __m256i even_then_odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i split =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(magnitude, even_then_odd), 0xD8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(split)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(split, 1)), x};
  }
  static __m256i order(__m256i bytes) { return bytes; }
};

struct Float32 {
  using Storage = float;
  static constexpr Element element = Element::kFloat32;
  HOTOP_INLINE static __m256 amax(const float* input) {
    __m256i x[kGroup];
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    for (int i = 0; i < kGroup; ++i) {
      const auto* p = reinterpret_cast<const __m256i*>(input + i * kBlock);
      x[i] = _mm256_max_epi32(_mm256_and_si256(_mm256_loadu_si256(p), mask),
                              _mm256_and_si256(_mm256_loadu_si256(p + 1), mask));
    }
    for (int i = 0; i < kGroup; i += 2) {
      x[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(x[i], x[i + 1]),
                              _mm256_unpackhi_epi32(x[i], x[i + 1]));
    }
    for (int i = 0; i < kGroup; i += 4) {
      x[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(x[i], x[i + 2]),
                              _mm256_unpackhi_epi64(x[i], x[i + 2]));
    }
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_permute2x128_si256(x[0], x[4], 0x20),
                                                _mm256_permute2x128_si256(x[0], x[4], 0x31)));
  }
  HOTOP_INLINE static Halves load(const float* input) {
    const __m256 low = _mm256_loadu_ps(input), high = _mm256_loadu_ps(input + 8);
    const __m256 even = _mm256_shuffle_ps(low, high, 0x88);
    const __m256 odd = _mm256_shuffle_ps(low, high, 0xDD);
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    const __m256i signs = _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                                             _mm256_castps_si256(odd), 0xAA);
    return {_mm256_and_ps(even, mask), _mm256_and_ps(odd, mask), signs};
  }
  // Bytes of a block stand as 0 1 4 5 2 3 6 7 after the shuffles above.
  static __m256i order(__m256i bytes) {
    return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                          0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
  }
};

// code(y) + offset in the low bits of a float32 of exponent 2^23, where additions round to
// integers: min(rne(2y), rne(y) + 2, rne(y/2) + 4). 2y and y/2 are exact.
template <bool clamp>
HOTOP_INLINE __m256i code_bits(__m256 y, float offset) {
  __m256 code = _mm256_fmadd_ps(y, _mm256_set1_ps(2.0f), _mm256_set1_ps(offset));
  code = _mm256_min_ps(code, _mm256_add_ps(y, _mm256_set1_ps(offset + 2.0f)));
  code =
      _mm256_min_ps(code, _mm256_fmadd_ps(y, _mm256_set1_ps(0.5f), _mm256_set1_ps(offset + 4.0f)));
  if (clamp) code = _mm256_min_ps(code, _mm256_set1_ps(offset + 7.0f));
  return _mm256_castps_si256(code);
}

// Both codes of eight bytes without their signs, a byte in each 32-bit place.
template <bool clamp>
HOTOP_INLINE __m256i magnitudes(const Halves& x, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  // The two offsets are chosen so that bits(a) + (bits(b) << 4) is 0 modulo 2^32: the sum below is
  // the byte itself.
  constexpr float even_offset = 8388608.0f, odd_offset = 8388608.0f + 5242880.0f;
  static_assert(bits_of(even_offset) + (bits_of(odd_offset) << 4) == 0);
  const __m256i even = code_bits<clamp>(_mm256_mul_ps(x.even, factor), even_offset);
  const __m256i odd = code_bits<clamp>(_mm256_mul_ps(x.odd, factor), odd_offset);
  return _mm256_add_epi32(even, _mm256_slli_epi32(odd, 4));
}

// Sixteen bytes in 16-bit places: block a's lower four, block b's lower four, and the upper ones.
template <typename Type, bool clamp>
HOTOP_INLINE __m256i two_blocks(const typename Type::Storage* input, const float* scales) {
  const Halves a = Type::load(input), b = Type::load(input + kBlock);
  const __m256i codes =
      _mm256_packus_epi32(magnitudes<clamp>(a, scales[0]), magnitudes<clamp>(b, scales[1]));
  // Bytes with a sign in bit 7, in pairs of even and odd, become the bits 3 and 7 of one byte.
  const __m256i signs = _mm256_srli_epi16(_mm256_packs_epi16(a.signs, b.signs), 4);
  const __m256i bits = _mm256_maddubs_epi16(_mm256_and_si256(signs, _mm256_set1_epi8(8)),
                                            _mm256_set1_epi16(16 << 8 | 1));
  return _mm256_or_si256(codes, bits);
}

template <typename Type, bool clamp>
HOTOP_INLINE void encode(const typename Type::Storage* input, const float* scales,
                         uint8_t* packed) {
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < kGroup; i += 4) {
    const auto* x = input + i * kBlock;
    const __m256i bytes =
        _mm256_packus_epi16(two_blocks<Type, clamp>(x, scales + i),
                            two_blocks<Type, clamp>(x + 2 * kBlock, scales + i + 2));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + i * 8),
                        Type::order(_mm256_permutevar8x32_epi32(bytes, in_order)));
  }
}

// Eight e4m3 scales in the low bytes, and the factors 1 / (sf * (1/g)).
HOTOP_INLINE __m256i scales_of(__m256 amax, __m256 g, __m256 inverse_g, __m256& factors) {
  const __m256 sign_mask = _mm256_set1_ps(-0.0f);
  const __m256 raw = _mm256_mul_ps(g, _mm256_mul_ps(amax, _mm256_set1_ps(float_of(kSixthBits))));
  const __m256 sign = _mm256_and_ps(raw, sign_mask);
  const __m256 y = _mm256_min_ps(_mm256_andnot_ps(sign_mask, raw), _mm256_set1_ps(kMaxE4M3));
  const __m256i bits = _mm256_castps_si256(y);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, last), _mm256_set1_epi32(0x7FFFF)), 20);
  const __m256i normal = _mm256_sub_epi32(rounded, _mm256_set1_epi32(120 << 3));
  const __m256i subnormal = _mm256_cvtps_epi32(_mm256_mul_ps(y, _mm256_set1_ps(512.0f)));
  const __m256 is_subnormal = _mm256_cmp_ps(y, _mm256_set1_ps(0.015625f), _CMP_LT_OQ);
  const __m256 value = _mm256_blendv_ps(
      _mm256_castsi256_ps(_mm256_slli_epi32(rounded, 20)),
      _mm256_mul_ps(_mm256_cvtepi32_ps(subnormal), _mm256_set1_ps(0.001953125f)), is_subnormal);
  const __m256i code = _mm256_blendv_epi8(normal, subnormal, _mm256_castps_si256(is_subnormal));
  const __m256 inverse =
      _mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_mul_ps(_mm256_or_ps(value, sign), inverse_g));
  factors = _mm256_and_ps(inverse, _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  return _mm256_or_si256(code, _mm256_srli_epi32(_mm256_castps_si256(sign), 24));
}

HOTOP_INLINE uint64_t low_bytes(__m256i words) {
  const __m256i halves = _mm256_packus_epi32(words, words);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(halves, halves),
                                                    _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)));
}

HOTOP_INLINE bool all(__m256 mask) { return _mm256_movemask_ps(mask) == 0xFF; }

// Groups with codes that saturate or with values that no formula above is made for.
template <typename Type>
[[gnu::noinline]] void quantize_carefully(const typename Type::Storage* input, int groups, float g,
                                          float inverse_g, uint8_t* packed, uint64_t* scales) {
  for (int i = 0; i < groups; ++i, input += kGroup * kBlock, packed += kGroup * 8) {
    alignas(32) float factors[kGroup];
    const __m256 amax = Type::amax(input);
    __m256 factor;
    const __m256i codes = scales_of(amax, _mm256_set1_ps(g), _mm256_set1_ps(inverse_g), factor);
    const __m256 greatest = _mm256_mul_ps(amax, factor);
    if (all(_mm256_cmp_ps(greatest, _mm256_set1_ps(INFINITY), _CMP_LT_OQ))) {
      _mm256_store_ps(factors, factor);
      encode<Type, true>(input, factors, packed);
      scales[i] = low_bytes(codes);
    } else {
      // NaN or Inf among the elements, a global scale that is not finite, or products past float32.
      quantize_blocks_scalar(Type::element, input, kGroup, g, packed,
                             reinterpret_cast<uint8_t*>(scales + i));
    }
  }
}

// Eight blocks in a group. First all scales, so that the latencies of their long chains overlap.
template <typename Type, int groups>
HOTOP_INLINE void quantize_groups(const typename Type::Storage* input, float g, float inverse_g,
                                  uint8_t* packed, uint64_t* scales) {
  alignas(32) float factors[groups * kGroup];
  __m256 below = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for (int i = 0; i < groups; ++i) {
    const __m256 amax = Type::amax(input + i * kGroup * kBlock);
    __m256 factor;
    scales[i] = low_bytes(scales_of(amax, _mm256_set1_ps(g), _mm256_set1_ps(inverse_g), factor));
    _mm256_store_ps(factors + i * kGroup, factor);
    // Rounding is monotonic: no |x| * factor of a block is above this one. Below 7 no code
    // saturates; NaN is not below.
    const __m256 greatest = _mm256_mul_ps(amax, factor);
    below = _mm256_and_ps(below, _mm256_cmp_ps(greatest, _mm256_set1_ps(7.0f), _CMP_LT_OQ));
  }
  if (__builtin_expect(!all(below), 0)) {
    quantize_carefully<Type>(input, groups, g, inverse_g, packed, scales);
    return;
  }
  for (int i = 0; i < groups; ++i) {
    encode<Type, false>(input + i * kGroup * kBlock, factors + i * kGroup, packed + i * kGroup * 8);
  }
}

template <typename Type>
void quantize(const QuantizeJob& job, int64_t first, int64_t last) {
  using Storage = typename Type::Storage;
  const float g = job.global_scale, inverse_g = 1.0f / g;
  quantize_rows<Storage, kGroup, kWide>(
      job, first, last,
      [=]<int groups>(Groups<groups>, const Storage* input, uint8_t* packed, uint64_t* scales) {
        quantize_groups<Type, groups>(input, g, inverse_g, packed, scales);
      });
}

const Kernels kernels = {"avx2",
                         {quantize<Float32>, quantize<BFloat16>, quantize<Float16>},
                         avx2::decode,
                         avx2::act_row_bytes,
                         avx2::weight_row_bytes,
                         avx2::prepare_act,
                         avx2::prepare_weight,
                         avx2::multiply_int8,
                         avx2::narrow};

}  // namespace

const Kernels* const kAvx2Kernels = &kernels;

}  // namespace hotop::nvfp4

#else

namespace hotop::nvfp4 {
const Kernels* const kAvx2Kernels = nullptr;
}

#endif
