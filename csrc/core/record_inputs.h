// The inputs of a recorded call as autograd sees them.
#pragma once

#include <algorithm>

#include "node.h"

namespace hotop {

// Looked at before the kernel runs, which may change Tensors and lists.
class RecordedInputs {
 public:
  RecordedInputs(const Plan& plan, PyObject* const* values, int size, THPFunction* ctx)
      : values_(values), size_(size) {
    torch::autograd::edge_list edges;
    ctx->is_variable_input.reserve(size);
    edges.reserve(plan.tensor_positions.size());
    for (int i = 0; i < size; ++i) {
      const Py_ssize_t count = plan.has_lists ? list_count(values[i]) : -1;
      if (plan.has_lists) counts_.push_back(count);
      if (count < 0) add(plan, values[i], ctx, edges);
      for (Py_ssize_t k = 0; k < count; ++k) add(plan, PyList_GET_ITEM(values[i], k), ctx, edges);
    }
    ctx->cdata->set_next_edges(std::move(edges));
  }

  bool any_requires_grad() const { return any_requires_grad_; }
  const ListCounts& counts() const { return counts_; }

  // Sets ctx.needs_input_grad. PyTorch hands metadata of its own along as further inputs, and its
  // backward counts on them.
  bool tell(const Plan& plan, THPFunction* ctx) const {
    const Py_ssize_t hidden = plan.has_lists ? 2 : 1;
    const auto size = static_cast<Py_ssize_t>(needs_.size());
    auto needs = PyRef::steal(PyTuple_New(size + hidden));
    for (Py_ssize_t i = 0; needs && i < size + hidden; ++i) {
      PyTuple_SET_ITEM(needs.get(), i, Py_NewRef(i < size && needs_[i] ? Py_True : Py_False));
    }
    ctx->needs_input_grad = needs.release();
    return ctx->needs_input_grad != nullptr;
  }

  // setup_context may have put an input into a list of outputs; the kernel cannot, it is checked.
  bool is_list_input(const at::Tensor& tensor) const {
    return std::any_of(list_tensors_.begin(), list_tensors_.end(),
                       [&](const at::Tensor& input) { return input.is_same(tensor); });
  }

  std::vector<at::Tensor> tensors() const {
    if (!counts_.empty()) return list_tensors_;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < size_; ++i) {
      if (is_tensor(values_[i])) tensors.push_back(THPVariable_Unpack(values_[i]));
    }
    return tensors;
  }

 private:
  void add(const Plan& plan, PyObject* value, THPFunction* ctx, torch::autograd::edge_list& edges) {
    const bool tensor_given = is_tensor(value);
    ctx->is_variable_input.push_back(tensor_given);
    bool requires_grad = false;
    if (tensor_given) {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      requires_grad = tensor.requires_grad();
      any_requires_grad_ |= requires_grad;
      edges.push_back(requires_grad ? torch::autograd::impl::gradient_edge(tensor)
                                    : torch::autograd::Edge());
      if (plan.has_lists) list_tensors_.push_back(tensor);
    }
    needs_.push_back(requires_grad);
  }

  PyObject* const* values_;
  int size_;
  c10::SmallVector<bool, 32> needs_;
  bool any_requires_grad_ = false;
  ListCounts counts_;
  std::vector<at::Tensor> list_tensors_;
};

}  // namespace hotop
