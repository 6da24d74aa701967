// What autograd does with the outputs of a recorded call.
#pragma once

#include "record_inputs.h"

namespace hotop {

// Ties the outputs to the node and saves what the formula asked for. The result of the call; null:
// an error is set. Throws what PyTorch's C++ throws.
PyObject* record_outputs(const Plan& plan, const RecordedInputs& inputs, THPFunction* ctx,
                         PyRef output);

}  // namespace hotop
