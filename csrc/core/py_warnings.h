// Warnings of PyTorch's C++ become Python warnings, as in every function of torch.
#pragma once

#include <torch/csrc/Exceptions.h>

namespace hotop {

// Runs `action`. Throws what it throws, and python_error when a warning filter raises.
template <typename Action>
void with_python_warnings(Action action) {
  torch::PyWarningHandler handler;
  try {
    action();
  } catch (const std::exception&) {
    handler.set_in_exception();
    throw;
  }
}

}  // namespace hotop
