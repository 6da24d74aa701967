// Which instruction set the kernels use: detected, set by name, or by HOTOP_NVFP4_ISA.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace hotop::nvfp4 {

// The kernels that `quantize` and `gemm` use now.
const Kernels& active_kernels();

// Null with `error` filled where this machine or build lacks the instruction set.
const Kernels* find_kernels(const std::string& isa, std::string& error);

// False with `error` filled; nothing changes then.
bool set_isa(const std::string& isa, std::string& error);

std::vector<std::string> available_isas();

// Floating-point state as the rules want it (nearest even, subnormals kept), until the end of the
// scope: torch.set_flush_denormal must not change bits.
class DefaultFloatState {
 public:
  DefaultFloatState();
  ~DefaultFloatState();
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
  unsigned long saved_;
};

}  // namespace hotop::nvfp4
