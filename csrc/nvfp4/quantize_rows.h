// The loop over blocks around a vector kernel, and the scales in either layout. For files with ISA
// flags, therefore anonymous.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "format.h"
#include "kernels.h"

namespace hotop::nvfp4 {
namespace {

// Scales arrive eight at a time in a little-endian word, row after row.
class ScaleStore {
 public:
  ScaleStore(const QuantizeJob& job, int64_t first_row)
      : scales_(job.scales),
        linear_(job.scales + first_row * job.blocks),
        row_(first_row),
        blocks_(job.blocks),
        tiles_(ceil_div(job.blocks, 4)),
        swizzled_(job.swizzled) {}

  void eight(uint64_t word) {
    if (!swizzled_) {
      std::memcpy(linear_, &word, 8);
      linear_ += 8;
    } else if (blocks_ % 4 == 0) {
      four(static_cast<uint32_t>(word));
      four(static_cast<uint32_t>(word >> 32));
    } else {
      some(word, 8);
    }
  }

  void some(uint64_t word, int64_t count) {
    for (int64_t i = 0; i < count; ++i, word >>= 8) {
      if (!swizzled_) {
        *linear_++ = static_cast<uint8_t>(word);
        continue;
      }
      scales_[swizzled_offset(row_, column_, tiles_)] = static_cast<uint8_t>(word);
      advance(1);
    }
  }

 private:
  void four(uint32_t word) {
    std::memcpy(scales_ + swizzled_offset(row_, column_, tiles_), &word, 4);
    advance(4);
  }
  void advance(int64_t columns) {
    column_ += columns;
    if (column_ == blocks_) {
      column_ = 0;
      ++row_;
    }
  }

  uint8_t* scales_;
  uint8_t* linear_;
  int64_t row_, column_ = 0;
  int64_t blocks_, tiles_;
  bool swizzled_;
};

template <int groups>
using Groups = std::integral_constant<int, groups>;

// Calls quantize(Groups<n>, input, packed, scale_words) for n groups of `size` blocks, a multiple
// of 8; n is `wide` as long as that many are left, then 1.
template <typename Storage, int size, int wide, typename Quantize>
void quantize_rows(const QuantizeJob& job, int64_t first, int64_t last, const Quantize& quantize) {
  ScaleStore store(job, first);
  const auto run = [&](const Storage* input, int64_t blocks, uint8_t* packed) {
    uint64_t scales[wide * size / 8];
    for (; blocks >= wide * size; blocks -= wide * size) {
      quantize(Groups<wide>(), input, packed, scales);
      for (const uint64_t word : scales) store.eight(word);
      input += wide * size * kBlock;
      packed += wide * size * 8;
    }
    while (blocks > 0) {
      // The last group is filled up with zeros.
      const int64_t count = std::min<int64_t>(blocks, size);
      Storage padded[size * kBlock];
      uint8_t codes[size * 8];
      if (count < size) {
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, input, count * kBlock * sizeof(Storage));
      }
      quantize(Groups<1>(), count < size ? padded : input, count < size ? codes : packed, scales);
      if (count < size) std::memcpy(packed, codes, count * 8);
      for (int64_t i = 0; i < count; i += 8) {
        if (count - i >= 8) {
          store.eight(scales[i / 8]);
        } else {
          store.some(scales[i / 8], count - i);
        }
      }
      blocks -= count;
      input += count * kBlock;
      packed += count * 8;
    }
  };
  const auto* input = static_cast<const Storage*>(job.input) + first * job.row_stride;
  uint8_t* packed = job.packed + first * job.blocks * 8;
  if (job.row_stride == job.blocks * kBlock) {
    run(input, (last - first) * job.blocks, packed);  // groups may span rows
    return;
  }
  for (int64_t row = first; row < last; ++row) {
    run(input, job.blocks, packed);
    input += job.row_stride;
    packed += job.blocks * 8;
  }
}

}  // namespace
}  // namespace hotop::nvfp4
