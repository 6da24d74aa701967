// NVFP4 quantization on an NVIDIA GPU behind a C interface, free of torch: `_nvfp4_cuda.so`.
// Not yet run on hardware: compiled, and its arithmetic tested on the host (tests/test_nvfp4_cuda).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "job.h"

namespace hotop_nvfp4_cuda {

template <>
struct Element<__half> {
  __device__ static float to_float(__half value) { return __half2float(value); }
};

template <>
struct Element<__nv_bfloat16> {
  __device__ static float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
};

namespace {

// Changes with every change of the interface below; hotop/nvfp4/_cuda.py asks for it.
constexpr int32_t kAbiVersion = 1;

constexpr int kThreads = 256;
constexpr int64_t kMostGridRows = 65535;

template <typename T, bool aligned>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Job job) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= job.padded_columns) return;
  const float g = *job.input_scale;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
       row < job.padded_rows; row += step)
    quantize_at<T, aligned>(job, row, column, g);
}

template <typename T>
void launch(const Job& job, cudaStream_t stream) {
  unsigned width = 1;  // threads along a row: a power of two, at most a warp
  while (width < 32 && width < job.padded_columns) width *= 2;
  const dim3 threads(width, kThreads / width);
  const dim3 grid(static_cast<unsigned>((job.padded_columns + width - 1) / width),
                  static_cast<unsigned>(
                      std::min((job.padded_rows + threads.y - 1) / threads.y, kMostGridRows)));
  if (is_aligned<T>(job))
    quantize_kernel<T, true><<<grid, threads, 0, stream>>>(job);
  else
    quantize_kernel<T, false><<<grid, threads, 0, stream>>>(job);
}

// This library has a CUDA runtime of its own, which may not know the device that torch chose.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (error_ == cudaSuccess && previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int device_;
  int previous_ = 0;
  cudaError_t error_;
};

}  // namespace
}  // namespace hotop_nvfp4_cuda

#define HOTOP_EXPORT extern "C" __attribute__((visibility("default")))

HOTOP_EXPORT int32_t hotop_nvfp4_cuda_abi_version() { return hotop_nvfp4_cuda::kAbiVersion; }

HOTOP_EXPORT const char* hotop_nvfp4_cuda_error_string(int32_t error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// Quantizes [rows, k] with `row_stride` elements from row to row and a contiguous last dimension.
// dtype: 0 float32, 1 bfloat16, 2 float16. input_scale: one float on the device. packed: rows * k/2
// bytes, aligned to 8. sf: rows * k/16 bytes, or ceil128(rows) * ceil4(k/16) if swizzled. Returns a
// cudaError_t; the work is queued on `stream`, nothing waits.
HOTOP_EXPORT int32_t hotop_nvfp4_cuda_quantize(const void* input, int64_t rows, int64_t k,
                                               int64_t row_stride, int32_t dtype,
                                               const float* input_scale, uint8_t* packed,
                                               uint8_t* sf, int32_t swizzled, int32_t device,
                                               void* stream) {
  using namespace hotop_nvfp4_cuda;
  if (!valid(rows, k, dtype)) return cudaErrorInvalidValue;
  const Job job = make_job(input, rows, k, row_stride, input_scale, packed, sf, swizzled != 0);
  if (job.padded_rows == 0 || job.padded_columns == 0) return cudaSuccess;
  const DeviceGuard guard(device);
  if (guard.error() != cudaSuccess) return guard.error();
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == 0)
    launch<float>(job, queue);
  else if (dtype == 1)
    launch<__nv_bfloat16>(job, queue);
  else
    launch<__half>(job, queue);
  return cudaGetLastError();
}
