// Kernels of gemm_avx2.cpp; the AVX-512 table uses them too.
#pragma once

#include "kernels.h"

namespace hotop::nvfp4::avx2 {

void decode(const Rows& rows, int64_t first, int64_t last, float global_scale, float* out);
int64_t act_row_bytes(int64_t blocks);
int64_t weight_row_bytes(int64_t blocks);
void prepare_act(const Rows& act, int64_t first, int64_t last, const PreparedRows& prepared);
void prepare_weight(const Rows& weight, int64_t first, int64_t last, const PreparedRows& prepared);
void multiply_int8(const PreparedRows& act, const PreparedRows& weight, int64_t blocks,
                   const Tile& tile);
void narrow(const float* in, int64_t count, Element type, void* out);

}  // namespace hotop::nvfp4::avx2
