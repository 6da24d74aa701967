// What a key holds of how Tensors lie in memory: classes of strides, and overlaps where something
// is changed.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>

#include "tuning_key.h"

namespace hotop {

// The Tensors of a call whose tactics change some of them: overlaps matter.
struct Touched {
  static constexpr int kMost = Key::kMaxWords / 2;
  struct Span {
    const c10::TensorImpl* impl;
    uintptr_t begin;
    uintptr_t end;
    bool mutated;
    bool exact;
  };
  Span spans[kMost];
  int count = 0;
  bool too_many = false;

  HOTOP_COLD void add(const c10::TensorImpl* impl, uintptr_t begin, bool mutated) {
    if (count == kMost) {
      too_many = true;
      return;
    }
    const auto item = static_cast<int64_t>(impl->itemsize());
    const int dimensions = static_cast<int>(impl->sizes().size());
    int64_t extent = 1;
    bool exact = false;
    for (int i = 0; i < dimensions; ++i) {
      const int64_t size = impl->sizes()[i];
      extent = size == 0 || extent == 0 ? 0 : extent + (size - 1) * impl->strides()[i];
      const uint8_t kind =
          stride_class(i, impl->sizes().data(), impl->strides().data(), dimensions, item);
      exact |= mutated && kind >= kStrideOther && kind < kStrideDense;
    }
    if (begin == 0) extent = 0;
    spans[count++] = {impl, begin, begin + static_cast<uintptr_t>(extent * item), mutated, exact};
  }

  // What classes of strides do not say where memory is changed: exact sizes and strides, distances.
  HOTOP_COLD void close(Key* key) {
    const auto overlap = [&](int i, int j) {
      const Span& a = spans[i];
      const Span& b = spans[j];
      return (a.mutated || b.mutated) && a.begin < b.end && b.begin < a.end;
    };
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < i; ++j) {
        if (overlap(i, j)) spans[i].exact = spans[j].exact = true;
      }
    }
    for (int i = 0; i < count; ++i) {
      if (!spans[i].exact) continue;
      key->add(tagged(KeyTag::Exact, static_cast<uint64_t>(i)));
      for (const int64_t size : spans[i].impl->sizes()) key->add(static_cast<uint64_t>(size));
      for (const int64_t stride : spans[i].impl->strides()) key->add(static_cast<uint64_t>(stride));
    }
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < i; ++j) {
        if (!overlap(i, j)) continue;
        key->add(tagged(KeyTag::Overlap, static_cast<uint64_t>(j) | static_cast<uint64_t>(i) << 8));
        key->add(static_cast<uint64_t>(spans[i].begin - spans[j].begin));
      }
    }
  }
};

// Classes of the strides behind the sizes, eight to a word.
HOTOP_COLD inline void add_strides(Key* key, const c10::TensorImpl* impl) {
  const int dimensions = static_cast<int>(impl->sizes().size());
  uint64_t word = 0;
  for (int i = 0; i < dimensions; ++i) {
    const auto kind = stride_class(i, impl->sizes().data(), impl->strides().data(), dimensions,
                                   static_cast<int64_t>(impl->itemsize()));
    word |= static_cast<uint64_t>(kind) << 8 * (i % 8);
    if (i % 8 != 7 && i + 1 != dimensions) continue;
    key->add(word);
    word = 0;
  }
}

}  // namespace hotop
