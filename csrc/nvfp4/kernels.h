// The inner kernels: one table of functions for each instruction set. Free of torch.
#pragma once

#include <cstdint>

namespace hotop::nvfp4 {

enum class Element : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Rows of 16-element blocks, elements of a row contiguous.
struct QuantizeJob {
  const void* input;
  int64_t row_stride;  // in elements
  int64_t blocks;      // k / 16
  float global_scale;
  uint8_t* packed;  // [rows, k/2]
  uint8_t* scales;  // [rows, k/16], or swizzled
  bool swizzled;
};

// Packed rows and their scales.
struct Rows {
  const uint8_t* packed;  // [rows, k/2]
  const uint8_t* scales;  // [rows, k/16], or swizzled
  int64_t blocks;         // k / 16
  bool swizzled;
};

// Rows made ready for integer dot products, in the form that the kernels of one table understand.
struct PreparedRows {
  uint8_t* data;      // of the first row that was prepared
  int64_t row_bytes;  // from one row to the next
};

// One tile of an output, from its first row and column.
struct Tile {
  int64_t rows;     // of the prepared activations
  int64_t columns;  // rows of the prepared weight
  float scale;
  float* out;
  int64_t out_stride;
};

struct Kernels {
  const char* isa;
  // Rows first..last of a quantization, by Element.
  void (*quantize[3])(const QuantizeJob& job, int64_t first, int64_t last);
  // out[row - first, :] = (code * scale) * (1 / global_scale)
  void (*decode)(const Rows& rows, int64_t first, int64_t last, float global_scale, float* out);
  // Exact integer dot products of blocks, summed in float32: sizes, operands, product.
  int64_t (*act_row_bytes)(int64_t blocks);
  int64_t (*weight_row_bytes)(int64_t blocks);
  void (*prepare_act)(const Rows& act, int64_t first, int64_t last, const PreparedRows& prepared);
  void (*prepare_weight)(const Rows& weight, int64_t first, int64_t last,
                         const PreparedRows& prepared);
  void (*multiply_int8)(const PreparedRows& act, const PreparedRows& weight, int64_t blocks,
                        const Tile& tile);
  // out = cast(in), nearest even
  void (*narrow)(const float* in, int64_t count, Element type, void* out);
};

extern const Kernels kScalarKernels;
// Null where the compiler cannot make them.
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;

// Blocks at a time by the scalar rules, for values that the vector kernels leave to them.
void quantize_blocks_scalar(Element type, const void* input, int64_t blocks, float global_scale,
                            uint8_t* packed, uint8_t* scales);

// One element after the other, as the formula is written; the measure of the other kernels.
void multiply_scalar(const Rows& act, int64_t first_row, const Rows& weight, int64_t first_column,
                     const Tile& tile);

}  // namespace hotop::nvfp4
