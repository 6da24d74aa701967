// What autograd does with the outputs of a recorded call, as after the forward of an
// autograd.Function: history, metadata for gradients that stay away, saved Tensors.
#include "record_outputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

#include "py_warnings.h"
#include "results.h"
#include "torch_compat.h"

namespace hotop {

namespace {

using Impls = std::unordered_set<at::TensorImpl*>;

// The outputs of a call one by one, lists of Tensors taken apart.
class FlatOutputs {
 public:
  FlatOutputs(const Plan& plan, PyObject* output) : is_tuple_(PyTuple_Check(output)) {
    if (!is_tuple_) add(plan, output);
    for (Py_ssize_t i = 0; is_tuple_ && i < PyTuple_GET_SIZE(output); ++i) {
      add(plan, PyTuple_GET_ITEM(output, i));
    }
  }

  std::vector<PyRef>& values() { return values_; }
  const std::vector<PyRef>& values() const { return values_; }
  const ListCounts& counts() const { return counts_; }

  // What the op returns; takes the values.
  PyRef rebuild() {
    size_t next = 0;
    const auto take = [&](Py_ssize_t count) -> PyObject* {
      if (count < 0) return values_[next++].release();
      PyObject* list = PyList_New(count);
      for (Py_ssize_t i = 0; list != nullptr && i < count; ++i) {
        PyList_SET_ITEM(list, i, values_[next++].release());
      }
      return list;
    };
    if (!is_tuple_) return PyRef::steal(take(counts_[0]));
    auto tuple = PyRef::steal(PyTuple_New(static_cast<Py_ssize_t>(counts_.size())));
    for (size_t i = 0; tuple && i < counts_.size(); ++i) {
      PyObject* value = take(counts_[i]);
      if (value == nullptr) return PyRef();
      PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value);
    }
    return tuple;
  }

 private:
  void add(const Plan& plan, PyObject* value) {
    const Py_ssize_t count = plan.has_lists ? list_count(value) : -1;
    counts_.push_back(count);
    if (count < 0) values_.push_back(PyRef::borrow(value));
    for (Py_ssize_t i = 0; i < count; ++i) {
      values_.push_back(PyRef::borrow(PyList_GET_ITEM(value, i)));
    }
  }

  bool is_tuple_;
  std::vector<PyRef> values_;
  ListCounts counts_;
};

// save_for_backward took anything; only Tensors and None can be saved.
bool can_be_saved(PyObject* to_save) {
  if (!PyTuple_Check(to_save)) {
    PyErr_SetString(PyExc_RuntimeError,
                    "autograd internal error: to_save attribute is expected to be a tuple but is ");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(to_save); ++i) {
    PyObject* value = PyTuple_GET_ITEM(to_save, i);
    if (value == Py_None || is_tensor(value)) continue;
    PyErr_Format(PyExc_TypeError,
                 "save_for_backward can only save variables, but argument %zd is of type %s", i,
                 Py_TYPE(value)->tp_name);
    return false;
  }
  return true;
}

void save(THPFunction* ctx, PyObject* to_save, const std::vector<PyRef>& outputs) {
  const auto is_output = [&](const at::Tensor& tensor) {
    return std::any_of(outputs.begin(), outputs.end(), [&](const PyRef& value) {
      return is_tensor(value.get()) && impl_of(value.get()) == tensor.unsafeGetTensorImpl();
    });
  };
  const Py_ssize_t size = PyTuple_GET_SIZE(to_save);
  ctx->saved_variables.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = PyTuple_GET_ITEM(to_save, i);
    if (value == Py_None) {
      ctx->saved_variables.emplace_back();
    } else {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      ctx->saved_variables.emplace_back(tensor, is_output(tensor));
    }
  }
}

// Nothing but new Tensors, and no wishes about them: then history is one edge per output.
bool all_fresh(const THPFunction* ctx, const RecordedInputs& inputs,
               const std::vector<PyRef>& outputs) {
  if (ctx->non_differentiable != nullptr || ctx->dirty_tensors != nullptr) return false;
  return std::all_of(outputs.begin(), outputs.end(), [&](const PyRef& value) {
    if (!is_tensor(value.get())) return true;
    return impl_of(value.get())->autograd_meta() == nullptr && storage_of(value.get()) != nullptr &&
           !inputs.is_list_input(THPVariable_Unpack(value.get()));
  });
}

bool is_differentiable(const at::Tensor& tensor) {
  return torch::autograd::isDifferentiableType(tensor.scalar_type());
}

void tie_fresh(THPFunction* ctx, const std::vector<PyRef>& outputs) {
  auto& node = *ctx->cdata;
  ctx->output_info.reserve(outputs.size());
  for (const PyRef& value : outputs) {
    if (!is_tensor(value.get())) {
      node.add_input_metadata(torch::autograd::Node::undefined_input());
      ctx->output_info.emplace_back();
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value.get());
    const bool differentiable = is_differentiable(tensor);
    if (differentiable) {
      const uint32_t place = node.add_input_metadata(tensor);
      torch::autograd::impl::set_gradient_edge(tensor, {ctx->cdata, place});
    } else {
      node.add_input_metadata(torch::autograd::Node::undefined_input());
    }
    const bool zeros_like = differentiable && outputs.size() > 1 && tensor.is_nested();
    ctx->output_info.emplace_back(tensor, zeros_like);
  }
}

// The Tensors that setup_context named in ctx.<attribute>. PyTorch's texts end before the type.
template <typename Visit>
bool visit_named(PyObject*& attribute, const char* no_tuple, const char* no_tensor, Visit visit) {
  auto named = PyRef::steal(std::exchange(attribute, nullptr));
  if (!named) return true;
  if (!PyTuple_Check(named.get())) {
    PyErr_SetString(PyExc_RuntimeError, no_tuple);
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(named.get()); ++i) {
    PyObject* value = PyTuple_GET_ITEM(named.get(), i);
    if (!is_tensor(value)) {
      PyErr_SetString(PyExc_RuntimeError, no_tensor);
      return false;
    }
    visit(impl_of(value));
  }
  return true;
}

at::Tensor view_as_self(const at::Tensor& tensor) {
  auto object = PyRef::steal(THPVariable_Wrap(tensor));
  if (!object) throw python_error();
  auto view = PyRef::steal(PyObject_CallMethod(object.get(), "view_as", "O", object.get()));
  if (!view) throw python_error();
  return THPVariable_Unpack(view.get());
}

// PyTorch's own function for every other case; it may put other Tensors in the outputs' places.
bool tie_by_pytorch(THPFunction* ctx, const RecordedInputs& inputs, std::vector<PyRef>& outputs) {
  Impls non_differentiable, dirty;
  if (!visit_named(ctx->non_differentiable,
                   "autograd internal error: non_differentiable attribute is expected to be a "
                   "tuple but is ",
                   "mark_non_differentiable only accepts variable arguments, but got ",
                   [&](at::TensorImpl* impl) { non_differentiable.insert(impl); }) ||
      !visit_named(ctx->dirty_tensors,
                   "autograd internal error: dirty_tensors attribute is expected to be a tuple "
                   "but is ",
                   "mark_dirty can only accept variables, but argument ",
                   [&](at::TensorImpl* impl) {
                     dirty.insert(impl);
                     impl->bump_version();  // while the tuple keeps the Tensor alive
                   })) {
    return false;
  }
  std::vector<std::optional<at::Tensor>> raw;
  for (const PyRef& value : outputs) {
    raw.push_back(is_tensor(value.get()) ? std::optional(THPVariable_Unpack(value.get()))
                                         : std::nullopt);
  }
  const bool executable = inputs.any_requires_grad();
  std::vector<std::optional<at::Tensor>> wrapped;
  with_python_warnings([&] {
    wrapped = wrap_outputs(inputs.tensors(), non_differentiable, dirty, raw,
                           executable ? ctx->cdata : nullptr, view_as_self);
  });
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!wrapped[i].has_value()) {
      if (executable) ctx->output_info.emplace_back();
      continue;
    }
    if (executable) {
      const bool zeros_like = outputs.size() > 1 && wrapped[i]->is_nested() &&
                              is_differentiable(*wrapped[i]) &&
                              non_differentiable.count(wrapped[i]->unsafeGetTensorImpl()) == 0;
      ctx->output_info.emplace_back(*wrapped[i], zeros_like);
    }
    outputs[i] = PyRef::steal(THPVariable_Wrap(std::move(*wrapped[i])));
    if (!outputs[i]) return false;
  }
  return true;
}

// setup_context may have put other things than Tensors into a list of outputs.
bool lists_are_whole(const Plan& plan, const ListCounts& counts) {
  for (size_t i = 0; i < counts.size() && i < plan.return_kinds.size(); ++i) {
    if (plan.return_kinds[i] == Kind::TensorList && counts[i] < 0) return false;
  }
  return true;
}

}  // namespace

PyObject* record_outputs(const Plan& plan, const RecordedInputs& inputs, THPFunction* ctx,
                         PyRef output) {
  const bool executable = inputs.any_requires_grad();
  FlatOutputs flat(plan, output.get());
  if (plan.has_lists && !keep_structure(ctx, inputs.counts(), flat.counts())) return nullptr;
  auto to_save = PyRef::steal(std::exchange(ctx->to_save, nullptr));
  if (to_save && executable && !can_be_saved(to_save.get())) return nullptr;
  const bool fresh = executable && all_fresh(ctx, inputs, flat.values());
  if (HOTOP_LIKELY(fresh)) {
    tie_fresh(ctx, flat.values());
  } else if (!tie_by_pytorch(ctx, inputs, flat.values())) {
    return nullptr;
  }
  if (executable) {
    if (!declare_grad_dtypes(ctx)) return nullptr;
    if (to_save) save(ctx, to_save.get(), flat.values());
    announce_node(ctx->cdata);
  }
  auto saved_for_forward = PyRef::steal(std::exchange(ctx->saved_for_forward, nullptr));
  if (fresh && !plan.has_lists) return output.release();
  auto result = flat.rebuild();
  if (!result || lists_are_whole(plan, flat.counts())) return result.release();
  return convert_result(plan, result.get());
}

}  // namespace hotop
