// Quantization with AVX-512: sixteen blocks (256 elements) at a time.
//
// NOT RUN ON AVX-512 HARDWARE YET. It is written with the compiler's 64-byte vectors, which compile
// for any instruction set: a test builds this file for AVX2 and compares its bits with the scalar
// kernels. Only the four functions that name intrinsics differ there.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#if __has_builtin(__builtin_shufflevector)  // GCC 12, clang
#define HOTOP_AVX512 1
#include <immintrin.h>
#endif
#endif

#if defined(HOTOP_AVX512) || defined(HOTOP_NVFP4_EMULATE_AVX512)
#include "avx2.h"
#include "format.h"
#include "quantize_rows.h"

#define HOTOP_INLINE inline __attribute__((always_inline))

namespace hotop::nvfp4 {
namespace {

constexpr int kGroup = 16;  // blocks

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

HOTOP_INLINE Words as_words(Floats x) { return reinterpret_cast<Words>(x); }
HOTOP_INLINE Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }

template <typename Vector>
HOTOP_INLINE Vector load(const void* p) {
  Vector x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

#ifdef HOTOP_AVX512
HOTOP_INLINE Floats smaller(Floats a, Floats b) {
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
}
HOTOP_INLINE Words greater(Words a, Words b) {
  return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b);
}
HOTOP_INLINE bool all_below(Floats x, float limit) {
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_LT_OQ) == 0xFFFF;
}
HOTOP_INLINE Bytes low_bytes(Words x) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)x); }
#else
HOTOP_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
HOTOP_INLINE Words greater(Words a, Words b) { return a > b ? a : b; }
HOTOP_INLINE bool all_below(Floats x, float limit) {
  bool all = true;
  for (int i = 0; i < 16; ++i) all = all && x[i] < limit;
  return all;
}
HOTOP_INLINE Bytes low_bytes(Words x) { return __builtin_convertvector(x, Bytes); }
#endif

// Two blocks' elements at even and at odd places, |x| as float32, the first block in the lower
// half; and the signs of both as the bits 3 and 7 of a byte.
struct Halves {
  Floats even, odd;
  Words signs;
};

HOTOP_INLINE Halves halves(Words even, Words odd) {
  return {as_floats(even & kAbsMask), as_floats(odd & kAbsMask),
          (even >> 28 & 8u) | (odd >> 24 & 0x80u)};
}

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr Element element = Element::kBFloat16;
  HOTOP_INLINE static Halves load_two(const uint16_t* input) {
    const Words x = load<Words>(input);
    return halves(x << 16, x & 0xFFFF0000u);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr Element element = Element::kFloat16;
  // |x| of a half in the low 15 bits. Inf and NaN become Inf: their blocks are left to the scalar
  // rules, which see the input itself.
  HOTOP_INLINE static Words widened(Words half) {
    const Words shifted = half << 13;
    const Words normal = shifted + (112u << 23);
    const Floats subnormal = as_floats(shifted + (113u << 23)) - 6.103515625e-05f;  // 2^-14
    const Words value = half < 0x0400u ? as_words(subnormal) : normal;
    return half >= 0x7C00u ? Words{} + kInfBits : value;
  }
  HOTOP_INLINE static Halves load_two(const uint16_t* input) {
    const Words x = load<Words>(input);
    const Words even = widened(x & 0x7FFFu), odd = widened(x >> 16 & 0x7FFFu);
    return halves(even | (x << 16 & 0x80000000u), odd | (x & 0x80000000u));
  }
};

struct Float32 {
  using Storage = float;
  static constexpr Element element = Element::kFloat32;
  HOTOP_INLINE static Halves load_two(const float* input) {
    const Words a = load<Words>(input), b = load<Words>(input + kBlock);
    return halves(
        __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
        __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
  }
};

// Maxima of halves: blocks stand as 8 (4, 2) places of a vector and become 4 (2, 1).
HOTOP_INLINE Words max_of_8(Words a, Words b) {
  return greater(
      __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
}
HOTOP_INLINE Words max_of_4(Words a, Words b) {
  return greater(
      __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
      __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
}
HOTOP_INLINE Words max_of_2(Words a, Words b) {
  return greater(
      __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
      __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
}

// Greatest |x| of sixteen blocks. As integers, so a NaN is the greatest.
template <typename Type>
HOTOP_INLINE Floats amax_of(const typename Type::Storage* input) {
  Words x[8];
  for (int i = 0; i < 8; ++i) {
    const Halves h = Type::load_two(input + i * 2 * kBlock);
    x[i] = greater(as_words(h.even), as_words(h.odd));
  }
  const Words a = max_of_4(max_of_8(x[0], x[1]), max_of_8(x[2], x[3]));
  const Words b = max_of_4(max_of_8(x[4], x[5]), max_of_8(x[6], x[7]));
  return as_floats(max_of_2(a, b));
}

// code(y) + offset in the low bits of a float32 of exponent 2^23, where additions round to
// integers: min(rne(2y), rne(y) + 2, rne(y/2) + 4, 7). 2y and y/2 are exact.
HOTOP_INLINE Words code_bits(Floats y, float offset) {
  const Floats code = smaller(smaller(y * 2.0f + offset, y + (offset + 2.0f)),
                              smaller(y * 0.5f + (offset + 4.0f), Floats{} + (offset + 7.0f)));
  return as_words(code);
}

// Sixteen bytes: two blocks, whose factors are given eight times each.
template <typename Type>
HOTOP_INLINE void encode_two(const typename Type::Storage* input, Floats factor, uint8_t* packed) {
  // The two offsets are chosen so that bits(a) + (bits(b) << 4) is 0 modulo 2^32: the sum below is
  // the byte itself.
  constexpr float even_offset = 8388608.0f, odd_offset = 8388608.0f + 5242880.0f;
  static_assert(bits_of(even_offset) + (bits_of(odd_offset) << 4) == 0);
  const Halves x = Type::load_two(input);
  const Words codes =
      code_bits(x.even * factor, even_offset) + (code_bits(x.odd * factor, odd_offset) << 4);
  const Bytes bytes = low_bytes(codes | x.signs);
  std::memcpy(packed, &bytes, sizeof(bytes));
}

template <typename Type, int i>
HOTOP_INLINE void encode_pair(const typename Type::Storage* input, Floats factors,
                              uint8_t* packed) {
  constexpr int a = 2 * i, b = 2 * i + 1;
  encode_two<Type>(
      input + a * kBlock,
      __builtin_shufflevector(factors, factors, a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b),
      packed + a * 8);
}

// Sixteen e4m3 scales, and the factors 1 / (sf * (1/g)).
HOTOP_INLINE Words scales_of(Floats amax, float g, float inverse_g, Floats& factors) {
  const Floats raw = g * (amax * float_of(kSixthBits));
  const Words sign = as_words(raw) & ~kAbsMask;
  const Floats y = smaller(as_floats(as_words(raw) & kAbsMask), Floats{} + kMaxE4M3);
  const Words bits = as_words(y);
  const Words rounded = (bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20;
  // Adding 2^23 leaves no bit below 1, so the addition rounds to nearest even.
  const Floats steps = y * 512.0f + 8388608.0f;
  const Words subnormal = as_words(steps) & 0xFu;
  const auto is_subnormal = y < 0.015625f;
  const Words code = is_subnormal ? subnormal : rounded - (120u << 3);
  const Floats value =
      is_subnormal ? (steps - 8388608.0f) * 0.001953125f : as_floats(rounded << 20);
  const Floats inverse = 1.0f / (as_floats(as_words(value) | sign) * inverse_g);
  factors = value != 0.0f ? inverse : Floats{};
  return code | sign >> 24;
}

template <typename Type>
[[gnu::noinline]] void quantize_rare(const typename Type::Storage* input, float g, uint8_t* packed,
                                     uint64_t* scales) {
  quantize_blocks_scalar(Type::element, input, kGroup, g, packed,
                         reinterpret_cast<uint8_t*>(scales));
}

template <typename Type>
HOTOP_INLINE void quantize_group(const typename Type::Storage* input, float g, float inverse_g,
                                 uint8_t* packed, uint64_t* scales) {
  const Floats amax = amax_of<Type>(input);
  Floats factors;
  const Words codes = scales_of(amax, g, inverse_g, factors);
  // Rounding is monotonic: no |x| * factor of a block is above this one. Above: NaN or Inf among
  // the elements, a global scale that is not finite, or products past float32.
  if (__builtin_expect(!all_below(amax * factors, INFINITY), 0)) {
    quantize_rare<Type>(input, g, packed, scales);
    return;
  }
  encode_pair<Type, 0>(input, factors, packed);
  encode_pair<Type, 1>(input, factors, packed);
  encode_pair<Type, 2>(input, factors, packed);
  encode_pair<Type, 3>(input, factors, packed);
  encode_pair<Type, 4>(input, factors, packed);
  encode_pair<Type, 5>(input, factors, packed);
  encode_pair<Type, 6>(input, factors, packed);
  encode_pair<Type, 7>(input, factors, packed);
  const Bytes bytes = low_bytes(codes);
  std::memcpy(scales, &bytes, sizeof(bytes));
}

template <typename Type>
void quantize(const QuantizeJob& job, int64_t first, int64_t last) {
  using Storage = typename Type::Storage;
  const float g = job.global_scale, inverse_g = 1.0f / g;
  quantize_rows<Storage, kGroup, 1>(
      job, first, last, [=](Groups<1>, const Storage* input, uint8_t* packed, uint64_t* scales) {
        quantize_group<Type>(input, g, inverse_g, packed, scales);
      });
}

// The rest is AVX2's.
const Kernels kernels = {"avx512",
                         {quantize<Float32>, quantize<BFloat16>, quantize<Float16>},
                         avx2::decode,
                         avx2::act_row_bytes,
                         avx2::weight_row_bytes,
                         avx2::prepare_act,
                         avx2::prepare_weight,
                         avx2::multiply_int8,
                         avx2::narrow};

}  // namespace

const Kernels* const kAvx512Kernels = &kernels;

}  // namespace hotop::nvfp4

#else

namespace hotop::nvfp4 {
const Kernels* const kAvx512Kernels = nullptr;
}

#endif
