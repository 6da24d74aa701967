// Work divided over PyTorch's number of threads, in pieces that do not depend on that number.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <exception>

#include "isa.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace hotop::nvfp4 {

// Calls f(begin, end) for pieces [i*grain, (i+1)*grain) of [0, count).
template <typename F>
void for_pieces(int64_t count, int64_t grain, const F& f) {
  const int64_t pieces = (count + grain - 1) / grain;
  const auto run = [&](int64_t piece) {
    const int64_t begin = piece * grain;
    f(begin, std::min(begin + grain, count));
  };
#ifdef _OPENMP
  if (pieces > 1 && !omp_in_parallel()) {
    // num_threads: another OpenMP runtime than PyTorch's may be loaded, and it would not know
    // torch.set_num_threads.
    const int threads = at::get_num_threads();
    if (threads > 1) {
      std::atomic<int64_t> next{0};
      std::atomic_flag failed = ATOMIC_FLAG_INIT;
      std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
      {
        DefaultFloatState state;
        for (;;) {
          const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
          if (piece >= pieces) break;
          try {
            run(piece);
          } catch (...) {
            if (!failed.test_and_set()) failure = std::current_exception();
          }
        }
      }
      if (failure) std::rethrow_exception(failure);
      return;
    }
  }
#endif
  for (int64_t piece = 0; piece < pieces; ++piece) run(piece);
}

}  // namespace hotop::nvfp4
