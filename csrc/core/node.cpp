// The autograd node of a recorded call. PyTorch's engine calls the method `apply` of its ctx; here
// that is a C function between the engine and the formula, in place of four Python frames.
#include "node.h"

#include <torch/csrc/Exceptions.h>

#include "python_compat.h"

namespace hotop {

namespace {

// A function of hotop._gradients, which holds what is rare and what errors need.
PyObject* python_part(const char* name) {
  static PyObject* module = nullptr;
  if (module == nullptr) module = PyImport_ImportModule("hotop._gradients");
  return module == nullptr ? nullptr : PyObject_GetAttrString(module, name);
}

// PyTorch's own road: the classes that it made for the op.
HOTOP_COLD PyObject* apply_by_pytorch(PyObject* self, PyObject* const* grads, Py_ssize_t count) {
  auto base = PyRef::borrow(reinterpret_cast<PyObject*>(Py_TYPE(self)->tp_base));
  auto apply = PyRef::steal(PyObject_GetAttrString(base.get(), "apply"));
  if (!apply) return nullptr;
  std::vector<PyObject*> args{self};
  args.insert(args.end(), grads, grads + count);
  return PyObject_Vectorcall(apply.get(), args.data(), args.size(), nullptr);
}

// The formula sees one flag per input that it was given; PyTorch's own stay behind them.
class VisibleNeeds {
 public:
  VisibleNeeds(THPFunction* ctx, PyRef visible)
      : ctx_(ctx), saved_(PyRef::steal(std::exchange(ctx->needs_input_grad, visible.release()))) {}
  ~VisibleNeeds() {
    auto visible = PyRef::steal(std::exchange(ctx_->needs_input_grad, saved_.release()));
  }
  VisibleNeeds(const VisibleNeeds&) = delete;
  VisibleNeeds& operator=(const VisibleNeeds&) = delete;

 private:
  THPFunction* ctx_;
  PyRef saved_;
};

PyRef call_formula(const PyRef& backward, PyObject* self, PyRef visible, PyObject* const* grads,
                   Py_ssize_t count) {
  c10::SmallVector<PyObject*, 16> args{nullptr, self};
  args.append(grads, grads + count);
  const VisibleNeeds needs(reinterpret_cast<THPFunction*>(self), std::move(visible));
  return PyRef::steal(PyObject_Vectorcall(backward.get(), args.data() + 1,
                                          (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

PyObject* apply_plain(const Plan& plan, const PyRef& backward, PyObject* self, PyObject* needs,
                      PyObject* const* grads, Py_ssize_t count) {
  const Py_ssize_t inputs = PyTuple_GET_SIZE(needs) - 1;
  auto visible = PyRef::steal(PyTuple_GetSlice(needs, 0, inputs));
  if (!visible) return nullptr;
  auto result = call_formula(backward, self, std::move(visible), grads, count);
  if (!result) return nullptr;
  const Py_ssize_t returned = PyTuple_Check(result.get()) ? PyTuple_GET_SIZE(result.get()) : 1;
  if (HOTOP_LIKELY(returned == inputs)) return result.release();
  auto check = PyRef::steal(python_part("check_count"));
  return !check ? nullptr
                : PyObject_CallFunction(check.get(), "sniO", plan.name.c_str(), inputs,
                                        plan.positional_count, result.get());
}

bool is_list_of_gradients(PyObject* value) {
  if (!PyList_CheckExact(value)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
    PyObject* element = PyList_GET_ITEM(value, i);
    if (element != Py_None && !is_tensor(element)) return false;
  }
  return true;
}

// Flat values as PyTorch's pytree would give them back: -1 stands for a value, n for a list of n.
PyRef unflatten(PyObject* counts, PyObject* const* values, Py_ssize_t available) {
  const Py_ssize_t size = PyTuple_GET_SIZE(counts);
  auto result = PyRef::steal(PyTuple_New(size));
  for (Py_ssize_t i = 0; result && i < size; ++i) {
    const Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(counts, i));
    const Py_ssize_t taken = count < 0 ? 1 : count;
    if (taken > available) return PyRef();
    available -= taken;
    PyObject* value = count < 0 ? Py_NewRef(*values) : PyList_New(count);
    if (value == nullptr) return PyRef();
    for (Py_ssize_t k = 0; k < count; ++k) PyList_SET_ITEM(value, k, Py_NewRef(values[k]));
    PyTuple_SET_ITEM(result.get(), i, value);
    values += taken;
  }
  return result;
}

// The gradients of a formula with lists, taken apart. Null without an error: something is unusual.
PyRef flatten_gradients(PyObject* counts, PyObject* result) {
  const Py_ssize_t size = PyTuple_GET_SIZE(counts);
  const bool is_tuple = PyTuple_CheckExact(result);
  if ((is_tuple ? PyTuple_GET_SIZE(result) : 1) != size) return PyRef();
  // Owned: making the tuple below may run a finalizer that changes the formula's lists.
  std::vector<PyRef> flat;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = is_tuple ? PyTuple_GET_ITEM(result, i) : result;
    const Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(counts, i));
    if (PyTuple_Check(value) || is_list_of_gradients(value) != (count >= 0)) return PyRef();
    if (count < 0) {
      flat.push_back(PyRef::borrow(value));
      continue;
    }
    if (PyList_GET_SIZE(value) != count) return PyRef();
    for (Py_ssize_t k = 0; k < count; ++k) flat.push_back(PyRef::borrow(PyList_GET_ITEM(value, k)));
  }
  auto tuple = PyRef::steal(PyTuple_New(static_cast<Py_ssize_t>(flat.size())));
  for (size_t i = 0; tuple && i < flat.size(); ++i) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), flat[i].release());
  }
  return tuple;
}

// As keep_structure makes it: two tuples of small ints.
bool is_structure(PyObject* value) {
  auto type = PyRef::steal(python_part("Structure"));
  if (!type) PyErr_Clear();
  if (!type || reinterpret_cast<PyObject*>(Py_TYPE(value)) != type.get()) return false;
  if (PyTuple_GET_SIZE(value) != 2) return false;
  for (Py_ssize_t part = 0; part < 2; ++part) {
    PyObject* counts = PyTuple_GET_ITEM(value, part);
    if (!PyTuple_CheckExact(counts)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counts); ++i) {
      PyObject* count = PyTuple_GET_ITEM(counts, i);
      if (!PyLong_CheckExact(count) || !surely_int64(count)) return false;
      const Py_ssize_t number = PyLong_AsSsize_t(count);
      if (number < -1 || number > INT32_MAX) return false;
    }
  }
  return true;
}

// How many values stand in these places.
Py_ssize_t total(PyObject* counts) {
  Py_ssize_t sum = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counts); ++i) {
    const Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(counts, i));
    sum += count < 0 ? 1 : count;
  }
  return sum;
}

PyObject* apply_with_lists(const Plan& plan, const PyRef& backward, PyObject* self, PyObject* needs,
                           PyObject* const* grads, Py_ssize_t count) {
  auto structure = PyRef::steal(PyObject_GetAttrString(self, "_pt_metadata"));
  if (!structure) return nullptr;
  // A formula or a user may have put something else there, or into needs_input_grad.
  if (!is_structure(structure.get())) return apply_by_pytorch(self, grads, count);
  PyObject* inputs = PyTuple_GET_ITEM(structure.get(), 0);
  if (total(inputs) + 2 != PyTuple_GET_SIZE(needs)) return apply_by_pytorch(self, grads, count);
  auto visible = unflatten(inputs, &PyTuple_GET_ITEM(needs, 0), PyTuple_GET_SIZE(needs));
  auto shaped = unflatten(PyTuple_GET_ITEM(structure.get(), 1), grads, count);
  if (!visible || !shaped) {
    return PyErr_Occurred() ? nullptr : apply_by_pytorch(self, grads, count);
  }
  auto result = call_formula(backward, self, std::move(visible), &PyTuple_GET_ITEM(shaped.get(), 0),
                             PyTuple_GET_SIZE(shaped.get()));
  if (!result) return nullptr;
  auto flat = flatten_gradients(inputs, result.get());
  if (flat || PyErr_Occurred()) return flat.release();
  auto flatten = PyRef::steal(python_part("flatten"));
  return !flatten ? nullptr
                  : PyObject_CallFunction(flatten.get(), "sOiO", plan.name.c_str(), structure.get(),
                                          plan.positional_count, result.get());
}

// ctx.apply(*grads), which PyTorch's engine calls.
PyObject* node_apply(PyObject* self, PyObject* const* grads, Py_ssize_t count) {
  static PyObject* const plan_name = PyUnicode_InternFromString("_hotop_plan");
  auto plan_object =
      PyRef::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(self)), plan_name));
  if (!plan_object) return nullptr;
  const Plan& plan = *reinterpret_cast<PlanObject*>(plan_object.get())->plan;
  auto backward = PyRef::borrow(plan.backward.get());
  auto needs = PyRef::borrow(reinterpret_cast<THPFunction*>(self)->needs_input_grad);
  if (!backward || !needs || !PyTuple_CheckExact(needs.get()) || PyTuple_GET_SIZE(needs.get()) == 0)
    return apply_by_pytorch(self, grads, count);
  return plan.has_lists ? apply_with_lists(plan, backward, self, needs.get(), grads, count)
                        : apply_plain(plan, backward, self, needs.get(), grads, count);
}

// ctx.save_for_backward(*tensors): PyTorch's is one line of Python.
PyObject* node_save_for_backward(PyObject* self, PyObject* tensors) {
  auto* ctx = reinterpret_cast<THPFunction*>(self);
  auto before = PyRef::steal(std::exchange(ctx->to_save, Py_NewRef(tensors)));
  Py_RETURN_NONE;
}

// What compiled autograd must know of the inputs. PyTorch notes it in every forward; the edges know
// it too, and compiled autograd asks for its key first.
void describe_inputs(THPFunction* ctx) {
  const auto& edges = ctx->cdata->next_edges();
  ctx->input_info.reserve(edges.size());
  for (const torch::autograd::Edge& edge : edges) {
    torch::autograd::VariableInfo info;
    if (edge.is_valid()) {
      const auto& metadata = edge.function->input_metadata(edge.input_nr);
      const c10::SymIntArrayRef size = metadata.shape_as_dim_vector();
      info.layout = metadata.layout();
      info.device = metadata.device();
      info.scalar_type = metadata.dtype().toScalarType();
      info.size.assign(size.begin(), size.end());
      info.requires_grad = true;
      info.is_empty = false;
    }
    ctx->input_info.push_back(std::move(info));
  }
}

// ctx._compiled_autograd_key()
PyObject* node_compiled_autograd_key(PyObject* self, PyObject*) {
  auto* ctx = reinterpret_cast<THPFunction*>(self);
  try {
    if (ctx->input_info.empty()) describe_inputs(ctx);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_CallMethod(reinterpret_cast<PyObject*>(Py_TYPE(self)->tp_base),
                             "_compiled_autograd_key", "O", self);
}

PyMethodDef node_methods[] = {
    {"_compiled_autograd_key", node_compiled_autograd_key, METH_NOARGS, nullptr},
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(node_apply)), METH_FASTCALL,
     nullptr},
    {"save_for_backward", node_save_for_backward, METH_VARARGS,
     "save_for_backward($self, /, *tensors)\n--\n\n"
     "Save Tensors for backward; see torch.autograd.function.FunctionCtx.save_for_backward."},
};

// add_node_methods(type)
PyObject* add_node_methods(PyObject*, PyObject* type) {
  if (!PyType_Check(type) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), &THPFunctionType)) {
    PyErr_SetString(PyExc_TypeError, "add_node_methods takes a class of autograd nodes");
    return nullptr;
  }
  for (PyMethodDef& method : node_methods) {
    auto bound = PyRef::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &method));
    if (!bound || PyObject_SetAttrString(type, method.ml_name, bound.get()) < 0) return nullptr;
  }
  Py_RETURN_NONE;
}

PyRef as_tuple(const ListCounts& counts) {
  auto tuple = PyRef::steal(PyTuple_New(static_cast<Py_ssize_t>(counts.size())));
  for (size_t i = 0; tuple && i < counts.size(); ++i) {
    PyObject* number = PyLong_FromSsize_t(counts[i]);
    if (number == nullptr) return PyRef();
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), number);
  }
  return tuple;
}

}  // namespace

PyObject* new_node(PyObject* node_type) {
  static PyObject* const none = PyTuple_New(0);
  auto* type = reinterpret_cast<PyTypeObject*>(node_type);
  return type->tp_new(type, none, nullptr);
}

Py_ssize_t list_count(PyObject* value) {
  if (!PyList_CheckExact(value)) return -1;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
    if (!is_tensor(PyList_GET_ITEM(value, i))) return -1;
  }
  return PyList_GET_SIZE(value);
}

bool keep_structure(THPFunction* ctx, const ListCounts& inputs, const ListCounts& outputs) {
  auto* object = reinterpret_cast<PyObject*>(ctx);
  if (PyObject_HasAttrString(object, "_pt_metadata")) {
    PyErr_SetString(PyExc_RuntimeError,
                    "Please don't set ctx._pt_metadata; PyTorch uses it to store info");
    return false;
  }
  auto type = PyRef::steal(python_part("Structure"));
  auto input_counts = as_tuple(inputs);
  auto output_counts = as_tuple(outputs);
  if (!type || !input_counts || !output_counts) return false;
  auto both = PyRef::steal(PyTuple_Pack(2, input_counts.get(), output_counts.get()));
  if (!both) return false;
  auto structure = PyRef::steal(PyObject_CallOneArg(type.get(), both.get()));
  return structure && PyObject_SetAttrString(object, "_pt_metadata", structure.get()) == 0;
}

PyMethodDef node_functions[] = {
    {"add_node_methods", add_node_methods, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
