// What one GPU thread does: read a block of 16, quantize it, write codes and scale where they
// belong. Compiles for the host as well, so that it can be tested there. Not yet run on hardware.
#pragma once

#include <cstdint>

#include "block.h"

namespace hotop_nvfp4_cuda {

// The element types; specialised for each one: `static float to_float(T)`, exact.
template <typename T>
struct Element;

template <>
struct Element<float> {
  HOTOP_HOST_DEVICE static float to_float(float value) { return value; }
};

template <typename T>
struct alignas(16) Vector {
  T values[kBlock];
};

struct Job {
  const void* input;
  const float* input_scale;
  uint8_t* packed;
  uint8_t* sf;
  int64_t rows;
  int64_t columns;  // blocks of 16 in a row
  int64_t row_stride;
  int64_t padded_rows;  // of the scales: as they are if linear
  int64_t padded_columns;
  bool swizzled;
};

inline bool valid(int64_t rows, int64_t k, int32_t dtype) {
  return rows >= 0 && k >= 0 && k % kBlock == 0 && dtype >= 0 && dtype <= 2;
}

inline Job make_job(const void* input, int64_t rows, int64_t k, int64_t row_stride,
                    const float* input_scale, uint8_t* packed, uint8_t* sf, bool swizzled) {
  const int64_t columns = k / kBlock;
  Job job{input, input_scale, packed, sf, rows, columns, row_stride, rows, columns, swizzled};
  if (swizzled) {
    job.padded_rows = (rows + 127) / 128 * 128;
    job.padded_columns = (columns + 3) / 4 * 4;
  }
  return job;
}

// Whether each block of `job.input` may be read as a Vector<T>.
template <typename T>
bool is_aligned(const Job& job) {
  return reinterpret_cast<uintptr_t>(job.input) % alignof(Vector<T>) == 0 &&
         job.row_stride * sizeof(T) % alignof(Vector<T>) == 0;
}

// row < padded_rows, column < padded_columns; beyond the tensor it writes the padding's zero.
template <typename T, bool aligned>
HOTOP_HOST_DEVICE void quantize_at(const Job& job, int64_t row, int64_t column, float g) {
  QuantizedBlock block{0, 0};
  if (row < job.rows && column < job.columns) {
    const T* source = static_cast<const T*>(job.input) + row * job.row_stride + column * kBlock;
    float x[kBlock];
    if constexpr (aligned) {
      const Vector<T> vector = *reinterpret_cast<const Vector<T>*>(source);
      for (int i = 0; i < kBlock; ++i) x[i] = Element<T>::to_float(vector.values[i]);
    } else {
      for (int i = 0; i < kBlock; ++i) x[i] = Element<T>::to_float(source[i]);
    }
    block = quantize_block(x, g);
    reinterpret_cast<uint64_t*>(job.packed)[row * job.columns + column] = block.codes;
  }
  const int64_t offset =
      job.swizzled ? swizzled_offset(row, column, job.columns) : row * job.columns + column;
  job.sf[offset] = block.sf;
}

}  // namespace hotop_nvfp4_cuda
