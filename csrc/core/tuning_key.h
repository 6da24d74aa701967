// The key of a tuned call: bucketed shapes, dtypes and values as 64-bit words, and the table of
// keys.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "py_ref.h"
#include "python_compat.h"

namespace hotop {

// How one dimension's size becomes part of a key.
struct BucketRule {
  enum Kind : uint8_t { Exact, PowerOfTwo, Listed, Left };  // Left: follows from other dimensions
  int64_t dimension;                                        // may count from the end
  Kind kind;
  int64_t cap;                 // sizes above it share a word of their own; negative: none
  std::vector<int64_t> sizes;  // Listed, ascending: the first that is large enough

  // The size that stands for this one, or ~cap for those above the last bucket.
  int64_t bucket(int64_t size) const;
};

// One parameter of the tuned function.
struct KeyedParameter {
  PyRef name;
  PyRef default_value;  // null: required
  bool ignored = false;
  bool mutated = false;
  std::vector<BucketRule> rules;
};

// Words on the stack. A call whose key would be longer is not tuned.
struct Key {
  static constexpr int kMaxWords = 96;
  uint64_t words[kMaxWords];
  int count = 0;
  bool too_long = false;
  bool any_autograd_meta = false;
  int device_type = -1;  // of the first Tensor, or of the first that is not on the CPU

  HOTOP_INLINE void add(uint64_t word) {
    if (HOTOP_UNLIKELY(count == kMaxWords)) {
      too_long = true;
      return;
    }
    words[count++] = word;
  }

  // Two chains of multiplications, so that neither waits for the other.
  HOTOP_INLINE uint64_t hash() const {
    uint64_t left = 0x9E3779B97F4A7C15u ^ static_cast<uint64_t>(count);
    uint64_t right = 0xD6E8FEB86659FD93u;
    int i = 0;
    for (; i + 3 < count; i += 4) {
      left = mix(left ^ words[i], words[i + 1] ^ 0xA0761D6478BD642Fu);
      right = mix(right ^ words[i + 2], words[i + 3] ^ 0xE7037ED1A0B428DBu);
    }
    for (; i < count; ++i) left = mix(left ^ words[i], 0xD6E8FEB86659FD93u);
    return mix(left ^ 0x8EBC6AF09C88C6E3u, right ^ 0x589965CC75374CC3u);
  }

  static HOTOP_INLINE uint64_t mix(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
};

// The first word of each value's part of a key.
enum class KeyTag : uint8_t {
  Tensor = 1,
  None,
  Bool,
  Int,
  Float,
  Dtype,
  Object,
  List,
  Allowed,
  Exact,    // sizes and strides of a Tensor, as they are
  Overlap,  // two Tensors in one memory, of which one is changed
};

constexpr uint64_t tagged(KeyTag tag, uint64_t rest = 0) {
  return static_cast<uint64_t>(tag) | rest << 8;
}

// A Tensor's first word. `packed`: its strides are those of a fresh Tensor of its sizes, also where
// a size is 1. `aligned`: its data begin at a multiple of 16 bytes. `parameter`: its class is that.
constexpr uint64_t tensor_word(int dtype, int64_t dimensions, bool packed, bool aligned,
                               bool parameter, int device_type, int device_index) {
  return tagged(KeyTag::Tensor,
                static_cast<uint64_t>(dtype & 0xFF) | (packed ? 0x100u : 0u) |
                    static_cast<uint64_t>(dimensions & 0x7F) << 9 |
                    static_cast<uint64_t>(device_type & 0xFF) << 16 |
                    static_cast<uint64_t>(static_cast<uint8_t>(device_index)) << 24 |
                    static_cast<uint64_t>(aligned) << 32 | static_cast<uint64_t>(parameter) << 33);
}

// `kind`: 0 list, 1 tuple, 2 torch.Size.
constexpr uint64_t list_word(int64_t size, int kind) {
  return tagged(KeyTag::List, static_cast<uint64_t>(size) | static_cast<uint64_t>(kind) << 48);
}

// What a key holds of a stride, one byte; `_layout` has the same rule.
constexpr uint8_t kStrideOther = 2;    // + 0 to 4: a multiple of 1, 2, 4, 8 or 16 bytes
constexpr uint8_t kStrideDense = 128;  // + the dimension that this one follows without a gap
uint8_t stride_class(int dimension, const int64_t* sizes, const int64_t* strides, int dimensions,
                     int64_t item_size);

// Open addressing; keys are compared whole, so two keys of one hash never share a choice.
class ChoiceTable {
 public:
  struct Choice {
    uint64_t hash;
    uint32_t offset;  // of the key's words in the pool
    uint16_t length;  // 0: free
    uint8_t tactic;
    bool tuned : 1;  // false: only a default that is remembered
    bool ask : 1;    // the tactic's `applies` has to be asked
  };

  HOTOP_INLINE const Choice* find(const Key& key) const {
    if (HOTOP_UNLIKELY(slots_.empty())) return nullptr;
    const uint64_t hash = key.hash();
    for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
      const Choice& slot = slots_[i];
      if (slot.length == 0) return nullptr;
      if (slot.hash == hash && slot.length == key.count &&
          std::memcmp(&pool_[slot.offset], key.words, key.count * sizeof(uint64_t)) == 0) {
        return &slot;
      }
    }
  }

  void set(const Key& key, uint8_t tactic, bool tuned, bool ask = false);
  void clear();
  size_t size() const { return used_; }
  size_t tuned_count() const;

 private:
  void grow();

  std::vector<Choice> slots_;
  std::vector<uint64_t> pool_;
  size_t mask_ = 0;
  size_t used_ = 0;
};

}  // namespace hotop
