// Decoding, integer dot products and narrowing casts with AVX2.
#include "avx2.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "format.h"

namespace hotop::nvfp4::avx2 {
namespace {

constexpr int64_t kGroup = 4;  // blocks that are multiplied at a time: 64 codes, 32 bytes

// Act rows: for each group 64 codes, 8 corrections and 8 scales.
struct ActGroup {
  int8_t even[32], odd[32];  // doubled codes
  int32_t correction[8];     // of the bias of the weight
  float scales[8];           // each twice, as the sums of a block come in two places
};

// Weight rows: for each group 64 codes, then the row's scales.
struct WeightGroup {
  uint8_t even[32], odd[32];  // doubled codes + 12, so that they are not negative
};

int64_t groups_of(int64_t blocks) { return ceil_div(blocks, kGroup); }

// The four scales from `column` on, a multiple of 4; those past the end are 0, whatever the
// padding holds.
inline __m128 load_scales(const Rows& rows, int64_t row, int64_t column) {
  const int64_t count = rows.blocks - column;
  uint32_t word = 0;
  if (rows.swizzled) {
    std::memcpy(&word, rows.scales + swizzled_offset(row, column, groups_of(rows.blocks)), 4);
    if (count < kGroup) word &= (1u << 8 * count) - 1;
  } else {
    std::memcpy(&word, rows.scales + row * rows.blocks + column, std::min(count, kGroup));
  }
  const __m128i codes = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(static_cast<int>(word)));
  const __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi32(0x7F));
  const __m128 normal =
      _mm_castsi128_ps(_mm_add_epi32(_mm_slli_epi32(magnitude, 20), _mm_set1_epi32(120 << 23)));
  const __m128 subnormal =
      _mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0.001953125f));  // steps of 2^-9
  __m128 value = _mm_blendv_ps(normal, subnormal,
                               _mm_castsi128_ps(_mm_cmplt_epi32(magnitude, _mm_set1_epi32(8))));
  const __m128i is_nan = _mm_cmpeq_epi32(magnitude, _mm_set1_epi32(0x7F));
  value = _mm_or_ps(value, _mm_castsi128_ps(_mm_and_si128(is_nan, _mm_set1_epi32(0x7FC00000))));
  const __m128i sign = _mm_slli_epi32(_mm_andnot_si128(_mm_set1_epi32(0x7F), codes), 24);
  return _mm_or_ps(value, _mm_castsi128_ps(sign));
}

// 32 bytes from block `column` on, zeros past the row's end.
inline __m256i load_codes(const Rows& rows, int64_t row, int64_t column) {
  const uint8_t* packed = rows.packed + (row * rows.blocks + column) * 8;
  const int64_t count = rows.blocks - column;
  if (count >= kGroup) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
  const __m256i mask =
      _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
  return _mm256_maskload_epi64(reinterpret_cast<const long long*>(packed), mask);
}

__m256i dot_bytes(__m256i unsigned_even, __m256i unsigned_odd, __m256i even, __m256i odd) {
  // At most 2 * 2 * 24 * 12 in 16 bits.
  const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(unsigned_even, even),
                                        _mm256_maddubs_epi16(unsigned_odd, odd));
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

// Sums of the lanes of four vectors.
__m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

template <int rows, int columns>
void micro_tile(const uint8_t* act, int64_t act_stride, const uint8_t* weight,
                int64_t weight_stride, int64_t groups, const Tile& tile, float* out) {
  __m256 sums[rows][columns];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm256_setzero_ps();
  }
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  for (int64_t g = 0; g < groups; ++g) {
    for (int n = 0; n < columns; ++n) {
      const uint8_t* row = weight + n * weight_stride;
      const auto* w = reinterpret_cast<const WeightGroup*>(row) + g;
      const auto* w_scales =
          reinterpret_cast<const float*>(row + groups * sizeof(WeightGroup)) + g * kGroup;
      const __m256i w_even = _mm256_load_si256(reinterpret_cast<const __m256i*>(w->even));
      const __m256i w_odd = _mm256_load_si256(reinterpret_cast<const __m256i*>(w->odd));
      const __m256 w_scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(w_scales), twice);
      for (int m = 0; m < rows; ++m) {
        const auto* a = reinterpret_cast<const ActGroup*>(act + m * act_stride) + g;
        const __m256i dot =
            dot_bytes(w_even, w_odd, _mm256_load_si256(reinterpret_cast<const __m256i*>(a->even)),
                      _mm256_load_si256(reinterpret_cast<const __m256i*>(a->odd)));
        const __m256i exact = _mm256_sub_epi32(
            dot, _mm256_load_si256(reinterpret_cast<const __m256i*>(a->correction)));
        const __m256 scale = _mm256_mul_ps(w_scale, _mm256_load_ps(a->scales));
        sums[m][n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, sums[m][n]);
      }
    }
  }
  // Codes were doubled on both sides.
  const __m128 quarter = _mm_set1_ps(0.25f), factor = _mm_set1_ps(tile.scale);
  for (int m = 0; m < rows; ++m) {
    const auto& s = sums[m];
    const __m128 total = sums_of(s[0], s[1 % columns], s[2 % columns], s[3 % columns]);
    const __m128 scaled = _mm_mul_ps(factor, _mm_mul_ps(quarter, total));
    alignas(16) float values[4];
    _mm_store_ps(values, scaled);
    for (int n = 0; n < columns; ++n) out[m * tile.out_stride + n] = values[n];
  }
}

template <int rows, int columns>
void rows_by_columns(const uint8_t* act, int64_t act_stride, const PreparedRows& weight,
                     int64_t groups, const Tile& tile, float* out) {
  int64_t n = 0;
  for (; n + columns <= tile.columns; n += columns) {
    micro_tile<rows, columns>(act, act_stride, weight.data + n * weight.row_bytes, weight.row_bytes,
                              groups, tile, out + n);
  }
  for (; n < tile.columns; ++n) {
    micro_tile<rows, 1>(act, act_stride, weight.data + n * weight.row_bytes, weight.row_bytes,
                        groups, tile, out + n);
  }
}

}  // namespace

int64_t act_row_bytes(int64_t blocks) { return groups_of(blocks) * sizeof(ActGroup); }

// 16 bytes of scales for each group, and 16 more since eight floats are read at a time.
int64_t weight_row_bytes(int64_t blocks) {
  return ceil_div(groups_of(blocks) * (sizeof(WeightGroup) + 16) + 16, 32) * 32;
}

void prepare_act(const Rows& act, int64_t first, int64_t last, const PreparedRows& prepared) {
  const __m256i doubled = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m256i nibble = _mm256_set1_epi8(15), bias = _mm256_set1_epi8(12);
  for (int64_t row = first; row < last; ++row) {
    auto* group = reinterpret_cast<ActGroup*>(prepared.data + (row - first) * prepared.row_bytes);
    for (int64_t column = 0; column < act.blocks; column += kGroup, ++group) {
      const __m256i codes = load_codes(act, row, column);
      const __m256i even = _mm256_shuffle_epi8(doubled, _mm256_and_si256(codes, nibble));
      const __m256i odd =
          _mm256_shuffle_epi8(doubled, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
      _mm256_store_si256(reinterpret_cast<__m256i*>(group->even), even);
      _mm256_store_si256(reinterpret_cast<__m256i*>(group->odd), odd);
      _mm256_store_si256(reinterpret_cast<__m256i*>(group->correction),
                         dot_bytes(bias, bias, even, odd));
      const __m128 scales = load_scales(act, row, column);
      _mm_store_ps(group->scales, _mm_unpacklo_ps(scales, scales));
      _mm_store_ps(group->scales + 4, _mm_unpackhi_ps(scales, scales));
    }
  }
}

void prepare_weight(const Rows& weight, int64_t first, int64_t last, const PreparedRows& prepared) {
  const __m256i biased = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  const int64_t groups = groups_of(weight.blocks);
  for (int64_t row = first; row < last; ++row) {
    uint8_t* data = prepared.data + (row - first) * prepared.row_bytes;
    auto* group = reinterpret_cast<WeightGroup*>(data);
    auto* scales = reinterpret_cast<float*>(data + groups * sizeof(WeightGroup));
    for (int64_t column = 0; column < weight.blocks; column += kGroup, ++group) {
      const __m256i codes = load_codes(weight, row, column);
      _mm256_store_si256(reinterpret_cast<__m256i*>(group->even),
                         _mm256_shuffle_epi8(biased, _mm256_and_si256(codes, nibble)));
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(group->odd),
          _mm256_shuffle_epi8(biased, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble)));
      _mm_store_ps(scales + column, load_scales(weight, row, column));
    }
    std::memset(scales + groups * kGroup, 0, 16);
  }
}

void multiply_int8(const PreparedRows& act, const PreparedRows& weight, int64_t blocks,
                   const Tile& tile) {
  const int64_t groups = groups_of(blocks);
  int64_t m = 0;
  for (; m + 4 <= tile.rows; m += 4) {
    rows_by_columns<4, 2>(act.data + m * act.row_bytes, act.row_bytes, weight, groups, tile,
                          tile.out + m * tile.out_stride);
  }
  for (; m + 2 <= tile.rows; m += 2) {
    rows_by_columns<2, 4>(act.data + m * act.row_bytes, act.row_bytes, weight, groups, tile,
                          tile.out + m * tile.out_stride);
  }
  for (; m < tile.rows; ++m) {
    rows_by_columns<1, 4>(act.data + m * act.row_bytes, act.row_bytes, weight, groups, tile,
                          tile.out + m * tile.out_stride);
  }
}

void decode(const Rows& rows, int64_t first, int64_t last, float global_scale, float* out) {
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256 factor = _mm256_set1_ps(1.0f / global_scale);
  for (int64_t row = first; row < last; ++row) {
    for (int64_t column = 0; column < rows.blocks; column += kGroup) {
      alignas(16) float scales[kGroup];
      _mm_store_ps(scales, load_scales(rows, row, column));
      const int64_t count = std::min(kGroup, rows.blocks - column);
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* packed = rows.packed + (row * rows.blocks + column + i) * 8;
        const __m256i bytes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)));
        const __m256 scale = _mm256_set1_ps(scales[i]);
        // permutevar looks at three bits: the magnitude.
        __m256 even = _mm256_permutevar8x32_ps(table, bytes);
        __m256 odd = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(bytes, 4));
        even = _mm256_xor_ps(
            even, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(bytes, 28), sign)));
        odd = _mm256_xor_ps(
            odd, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(bytes, 24), sign)));
        even = _mm256_mul_ps(_mm256_mul_ps(even, scale), factor);
        odd = _mm256_mul_ps(_mm256_mul_ps(odd, scale), factor);
        const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        _mm256_storeu_ps(out, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(out + 8, _mm256_permute2f128_ps(low, high, 0x31));
        out += kBlock;
      }
    }
  }
}

void narrow(const float* in, int64_t count, Element type, void* out) {
  if (type == Element::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
    return;
  }
  auto* halves = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 x = _mm256_loadu_ps(in + i);
    __m128i result;
    if (type == Element::kFloat16) {
      result = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    } else {
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_srli_epi32(
          _mm256_add_epi32(_mm256_add_epi32(bits, last), _mm256_set1_epi32(0x7FFF)), 16);
      const __m256i value =
          _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0),
                             _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(value, value), 0x08);
      result = _mm256_castsi256_si128(words);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), result);
  }
  for (; i < count; ++i) {
    halves[i] = type == Element::kFloat16 ? float_to_half(in[i]) : float_to_bfloat16(in[i]);
  }
}

}  // namespace hotop::nvfp4::avx2

#endif
