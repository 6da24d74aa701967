// Bucket rules and the table of tuned choices.
#include "tuning_key.h"

#include <algorithm>
#include <bit>

namespace hotop {

int64_t BucketRule::bucket(int64_t size) const {
  if (kind == Listed) {
    auto place = std::lower_bound(sizes.begin(), sizes.end(), size);
    return place == sizes.end() ? ~sizes.back() : *place;
  }
  if (cap >= 0 && size > cap) return ~cap;
  if (kind == PowerOfTwo && size > 0) {
    // Beyond 2^62 no power of two fits.
    size = size > (int64_t{1} << 62) ? size : int64_t(std::bit_ceil(static_cast<uint64_t>(size)));
  }
  return cap >= 0 ? std::min(size, cap) : size;
}

uint8_t stride_class(int dimension, const int64_t* sizes, const int64_t* strides, int dimensions,
                     int64_t item_size) {
  const int64_t stride = strides[dimension];
  if (stride == 0 || stride == 1) return static_cast<uint8_t>(stride);
  for (int inner = 0; inner < dimensions; ++inner) {
    if (inner != dimension && strides[inner] != 0 && strides[inner] * sizes[inner] == stride) {
      return static_cast<uint8_t>(kStrideDense + inner);
    }
  }
  const auto bytes = static_cast<uint64_t>(stride * item_size);
  return static_cast<uint8_t>(kStrideOther + std::min(std::countr_zero(bytes), 4));
}

void ChoiceTable::set(const Key& key, uint8_t tactic, bool tuned, bool ask) {
  if (const Choice* known = find(key)) {
    auto* choice = const_cast<Choice*>(known);
    choice->tactic = tactic;
    choice->tuned = tuned;
    choice->ask = ask;
    return;
  }
  if (2 * (used_ + 1) > slots_.size()) grow();
  const uint64_t hash = key.hash();
  size_t i = hash & mask_;
  while (slots_[i].length != 0) i = (i + 1) & mask_;
  slots_[i] = {
      hash, static_cast<uint32_t>(pool_.size()), static_cast<uint16_t>(key.count), tactic, tuned,
      ask};
  pool_.insert(pool_.end(), key.words, key.words + key.count);
  ++used_;
}

void ChoiceTable::grow() {
  std::vector<Choice> old(slots_.empty() ? 16 : 2 * slots_.size(), Choice{});
  old.swap(slots_);
  mask_ = slots_.size() - 1;
  for (const Choice& choice : old) {
    if (choice.length == 0) continue;
    size_t i = choice.hash & mask_;
    while (slots_[i].length != 0) i = (i + 1) & mask_;
    slots_[i] = choice;
  }
}

size_t ChoiceTable::tuned_count() const {
  return std::count_if(slots_.begin(), slots_.end(),
                       [](const Choice& slot) { return slot.length != 0 && slot.tuned; });
}

void ChoiceTable::clear() {
  slots_.clear();
  pool_.clear();
  mask_ = used_ = 0;
}

}  // namespace hotop
