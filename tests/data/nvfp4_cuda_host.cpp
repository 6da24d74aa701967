// The C interface of _nvfp4_cuda.so on the host: the kernel's own headers in a loop.
#include <cstdint>
#include <cstring>

#include "job.h"

using namespace hotop_nvfp4_cuda;

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};

namespace hotop_nvfp4_cuda {
template <>
struct Element<BFloat16> {
  static float to_float(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }
};
template <>
struct Element<Half> {
  static float to_float(Half value) { return static_cast<float>(value.value); }
};
}  // namespace hotop_nvfp4_cuda

template <typename T>
static void run(const Job& job) {
  for (int64_t row = 0; row < job.padded_rows; ++row)
    for (int64_t column = 0; column < job.padded_columns; ++column)
      if (is_aligned<T>(job))
        quantize_at<T, true>(job, row, column, *job.input_scale);
      else
        quantize_at<T, false>(job, row, column, *job.input_scale);
}

extern "C" {

int32_t hotop_nvfp4_cuda_abi_version() { return ABI_VERSION; }

const char* hotop_nvfp4_cuda_error_string(int32_t) { return "invalid argument"; }

int32_t hotop_nvfp4_cuda_quantize(const void* input, int64_t rows, int64_t k, int64_t row_stride,
                                  int32_t dtype, const float* input_scale, uint8_t* packed,
                                  uint8_t* sf, int32_t swizzled, int32_t device, void* stream) {
  if (!valid(rows, k, dtype) || device != 0 || stream != nullptr) return 1;
  const Job job = make_job(input, rows, k, row_stride, input_scale, packed, sf, swizzled != 0);
  if (dtype == 0)
    run<float>(job);
  else if (dtype == 1)
    run<BFloat16>(job);
  else
    run<Half>(job);
  return 0;
}

void encode_e4m3_all(const float* input, int64_t size, uint8_t* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = encode_e4m3(input[i]);
}

void encode_e2m1_all(const float* input, int64_t size, uint8_t* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = static_cast<uint8_t>(encode_e2m1(input[i]));
}

void decode_e4m3_all(const uint8_t* input, int64_t size, float* result) {
  for (int64_t i = 0; i < size; ++i) result[i] = decode_e4m3(input[i]);
}

}  // extern "C"
