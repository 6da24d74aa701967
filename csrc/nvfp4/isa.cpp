// Detection of the instruction set, its override, and the floating-point state.
#include "isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace hotop::nvfp4 {
namespace {

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know f16c.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool cpu_has(const std::string& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == "avx2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
  if (isa == "avx512") {
    return cpu_has("avx2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == "scalar";
}

const Kernels* best() {
  if (kAvx512Kernels != nullptr && cpu_has("avx512")) return kAvx512Kernels;
  if (kAvx2Kernels != nullptr && cpu_has("avx2")) return kAvx2Kernels;
  return &kScalarKernels;
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}

}  // namespace

const Kernels& active_kernels() { return *active().load(std::memory_order_relaxed); }

const Kernels* find_kernels(const std::string& isa, std::string& error) {
  const Kernels* kernels = nullptr;
  if (isa == "scalar") {
    kernels = &kScalarKernels;
  } else if (isa == "avx2") {
    kernels = kAvx2Kernels;
  } else if (isa == "avx512") {
    kernels = kAvx512Kernels;
  } else {
    error = "hotop._nvfp4: unknown instruction set '" + isa + "', expected scalar, avx2 or avx512";
    return nullptr;
  }
  if (kernels == nullptr) {
    error = "hotop._nvfp4: this build has no " + isa + " kernels";
  } else if (!cpu_has(isa)) {
    error = "hotop._nvfp4: this CPU does not have the instruction set " + isa;
    kernels = nullptr;
  }
  return kernels;
}

bool set_isa(const std::string& isa, std::string& error) {
  const Kernels* kernels = find_kernels(isa, error);
  if (kernels == nullptr) return false;
  active().store(kernels, std::memory_order_relaxed);
  return true;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  std::string error;
  for (const char* isa : {"scalar", "avx2", "avx512"}) {
    if (find_kernels(isa, error) != nullptr) names.emplace_back(isa);
  }
  return names;
}

#if defined(__x86_64__)
DefaultFloatState::DefaultFloatState() : saved_(_mm_getcsr()) {
  if ((saved_ & 0xFFC0) != 0x1F80) _mm_setcsr(0x1F80);
}
// Exception flags raised meanwhile are dropped only with the state that was changed.
DefaultFloatState::~DefaultFloatState() {
  if ((saved_ & 0xFFC0) != 0x1F80) _mm_setcsr(static_cast<unsigned>(saved_));
}
#elif defined(__aarch64__)
DefaultFloatState::DefaultFloatState() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(0ul));
}
DefaultFloatState::~DefaultFloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
DefaultFloatState::DefaultFloatState() : saved_(0) {}
DefaultFloatState::~DefaultFloatState() {}
#endif

}  // namespace hotop::nvfp4
