// hotop._nvfp4: the kernels as Python functions and, for comparison, as dispatcher ops.
#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

#include "ops.h"

namespace hotop::nvfp4 {
namespace {

constexpr int kMaxArguments = 8;

// A function's arguments: all names, how many are required, and the names as Python strings.
struct Signature {
  const char* function;
  const char* names[kMaxArguments];
  int count, required;
  PyObject* interned[kMaxArguments] = {};

  // Fills `values` (borrowed, null where not given); false with a Python error.
  bool read(PyObject* const* args, Py_ssize_t given, PyObject* keywords, PyObject** values) {
    if (given > count) {
      PyErr_Format(PyExc_TypeError, "%s() takes %d arguments but %zd were given", function, count,
                   given);
      return false;
    }
    for (int i = 0; i < count; ++i) values[i] = i < given ? args[i] : nullptr;
    const Py_ssize_t extra = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t j = 0; j < extra; ++j) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, j);
      const int i = find(keyword);
      if (i < 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function,
                     keyword);
        return false;
      }
      if (values[i] != nullptr) {
        PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", function,
                     names[i]);
        return false;
      }
      values[i] = args[given + j];
    }
    for (int i = 0; i < required; ++i) {
      if (values[i] == nullptr) {
        PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", function, names[i]);
        return false;
      }
    }
    return true;
  }

 private:
  int find(PyObject* keyword) {
    for (int i = 0; i < count; ++i) {
      if (interned[i] == nullptr) interned[i] = PyUnicode_InternFromString(names[i]);
      if (interned[i] == keyword) return i;
    }
    for (int i = 0; i < count; ++i) {
      if (PyUnicode_CompareWithASCIIString(keyword, names[i]) == 0) return i;
    }
    return -1;
  }
};

[[noreturn]] void wrong_type(const Signature& signature, int i, const char* expected,
                             PyObject* value) {
  throw torch::TypeError(std::string(signature.function) + "(): argument '" + signature.names[i] +
                         "' must be " + expected + ", not " + Py_TYPE(value)->tp_name);
}

const at::Tensor& tensor(const Signature& signature, int i, PyObject* value) {
  if (!THPVariable_Check(value)) wrong_type(signature, i, "Tensor", value);
  return THPVariable_Unpack(value);
}

int64_t integer(const Signature& signature, int i, PyObject* value) {
  if (!PyLong_Check(value)) wrong_type(signature, i, "int", value);
  const int64_t result = PyLong_AsLongLong(value);
  if (result == -1 && PyErr_Occurred()) throw python_error();
  return result;
}

bool boolean(const Signature& signature, int i, PyObject* value) {
  if (value == Py_True) return true;
  if (value == Py_False) return false;
  wrong_type(signature, i, "bool", value);
}

at::ScalarType dtype(const Signature& signature, int i, PyObject* value) {
  if (!THPDtype_Check(value)) wrong_type(signature, i, "torch.dtype", value);
  return reinterpret_cast<THPDtype*>(value)->scalar_type;
}

// Runs f, without the GIL where there is enough work for other threads to gain from it.
template <typename F>
auto run(int64_t work, const F& f) {
  if (work < kReleaseGilFrom) return f();
  pybind11::gil_scoped_release no_gil;
  return f();
}

Signature quantize_signature{
    "quantize", {"input", "input_scale", "scaling_vector_size", "is_sf_swizzled_layout"}, 4, 2};

template <typename Choose>
PyObject* quantize_with(PyObject* const* args, Py_ssize_t given, PyObject* keywords,
                        const Choose& choose) {
  HANDLE_TH_ERRORS
  Signature& s = quantize_signature;
  PyObject* v[kMaxArguments];
  if (!s.read(args, given, keywords, v)) return nullptr;
  const at::Tensor& input = tensor(s, 0, v[0]);
  const at::Tensor& input_scale = tensor(s, 1, v[1]);
  const int64_t size = v[2] == nullptr ? 16 : integer(s, 2, v[2]);
  const bool swizzled = v[3] != nullptr && boolean(s, 3, v[3]);
  const Kernels* kernels = choose();
  auto [packed, scales] =
      run(input.numel(), [&] { return quantize(kernels, input, input_scale, size, swizzled); });
  PyObject* result = PyList_New(2);
  if (result == nullptr) return nullptr;
  PyList_SET_ITEM(result, 0, THPVariable_Wrap(std::move(packed)));
  PyList_SET_ITEM(result, 1, THPVariable_Wrap(std::move(scales)));
  if (PyList_GET_ITEM(result, 0) == nullptr || PyList_GET_ITEM(result, 1) == nullptr) {
    Py_DECREF(result);
    return nullptr;
  }
  return result;
  END_HANDLE_TH_ERRORS
}

const Kernels* require(const char* isa) {
  std::string error;
  const Kernels* kernels = find_kernels(isa, error);
  if (kernels == nullptr) throw std::runtime_error(error);
  return kernels;
}

PyObject* quantize_best(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  return quantize_with(args, given, keywords, [] { return &active_kernels(); });
}
PyObject* quantize_scalar(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  return quantize_with(args, given, keywords, [] { return &kScalarKernels; });
}
PyObject* quantize_avx2(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  return quantize_with(args, given, keywords, [] { return require("avx2"); });
}
PyObject* quantize_avx512(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  return quantize_with(args, given, keywords, [] { return require("avx512"); });
}
PyObject* quantize_trivial(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  return quantize_with(args, given, keywords, [] { return static_cast<const Kernels*>(nullptr); });
}

Signature gemm_signature{"gemm",
                         {"act_fp4", "weight", "act_sf", "weight_scale", "alpha", "output_dtype",
                          "to_userbuffers", "allowed_backends"},
                         8,
                         6};

template <Tactic tactic>
PyObject* gemm_with(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  HANDLE_TH_ERRORS
  Signature& s = gemm_signature;
  PyObject* v[kMaxArguments];
  if (!s.read(args, given, keywords, v)) return nullptr;
  const at::Tensor* t[5];
  for (int i = 0; i < 5; ++i) t[i] = &tensor(s, i, v[i]);
  const at::ScalarType type = dtype(s, 5, v[5]);
  const int64_t rows = t[1]->dim() == 2 ? t[1]->sizes()[0] : 0;
  return THPVariable_Wrap(run(
      t[0]->numel() * rows, [&] { return gemm(tactic, *t[0], *t[1], *t[2], *t[3], *t[4], type); }));
  END_HANDLE_TH_ERRORS
}

Signature dequantize_signature{
    "dequantize", {"packed", "sf", "global_scale", "dtype", "is_sf_swizzled_layout"}, 5, 5};

PyObject* py_dequantize(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  HANDLE_TH_ERRORS
  Signature& s = dequantize_signature;
  PyObject* v[kMaxArguments];
  if (!s.read(args, given, keywords, v)) return nullptr;
  const at::Tensor &packed = tensor(s, 0, v[0]), &sf = tensor(s, 1, v[1]),
                   &scale = tensor(s, 2, v[2]);
  const at::ScalarType type = dtype(s, 3, v[3]);
  const bool swizzled = boolean(s, 4, v[4]);
  return THPVariable_Wrap(
      run(packed.numel(), [&] { return dequantize(packed, sf, scale, type, swizzled); }));
  END_HANDLE_TH_ERRORS
}

Signature swizzle_signature{"swizzle", {"sf"}, 1, 1};
Signature unswizzle_signature{"unswizzle", {"sf", "rows", "columns"}, 3, 3};

PyObject* py_swizzle(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  HANDLE_TH_ERRORS
  PyObject* v[kMaxArguments];
  if (!swizzle_signature.read(args, given, keywords, v)) return nullptr;
  return THPVariable_Wrap(swizzle(tensor(swizzle_signature, 0, v[0])));
  END_HANDLE_TH_ERRORS
}

PyObject* py_unswizzle(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  HANDLE_TH_ERRORS
  Signature& s = unswizzle_signature;
  PyObject* v[kMaxArguments];
  if (!s.read(args, given, keywords, v)) return nullptr;
  return THPVariable_Wrap(unswizzle(tensor(s, 0, v[0]), integer(s, 1, v[1]), integer(s, 2, v[2])));
  END_HANDLE_TH_ERRORS
}

PyObject* py_isa(PyObject*, PyObject*) { return PyUnicode_FromString(active_kernels().isa); }

PyObject* py_set_isa(PyObject*, PyObject* name) {
  const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  if (text == nullptr) {
    if (!PyErr_Occurred()) {
      PyErr_Format(PyExc_TypeError, "set_isa(): argument 'name' must be str, not %s",
                   Py_TYPE(name)->tp_name);
    }
    return nullptr;
  }
  std::string error;
  if (!set_isa(text, error)) {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* py_available_isas(PyObject*, PyObject*) {
  const auto names = available_isas();
  PyObject* result = PyList_New(static_cast<Py_ssize_t>(names.size()));
  for (size_t i = 0; result != nullptr && i < names.size(); ++i) {
    PyList_SET_ITEM(result, i, PyUnicode_FromString(names[i].c_str()));
  }
  return result;
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

PyMethodDef fast(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL | METH_KEYWORDS, nullptr};
}

PyMethodDef functions[] = {fast("quantize", quantize_best),
                           fast("quantize_scalar", quantize_scalar),
                           fast("quantize_avx2", quantize_avx2),
                           fast("quantize_avx512", quantize_avx512),
                           fast("quantize_trivial", quantize_trivial),
                           fast("gemm", gemm_with<Tactic::kAuto>),
                           fast("gemm_blas", gemm_with<Tactic::kBlas>),
                           fast("gemm_int8", gemm_with<Tactic::kInt8>),
                           fast("gemm_blas_wide", gemm_with<Tactic::kBlasWide>),
                           fast("gemm_int8_wide", gemm_with<Tactic::kInt8Wide>),
                           fast("gemm_scalar", gemm_with<Tactic::kScalar>),
                           fast("gemm_trivial", gemm_with<Tactic::kTrivial>),
                           fast("dequantize", py_dequantize),
                           fast("swizzle", py_swizzle),
                           fast("unswizzle", py_unswizzle),
                           {"isa", py_isa, METH_NOARGS, nullptr},
                           {"set_isa", py_set_isa, METH_O, nullptr},
                           {"available_isas", py_available_isas, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "hotop._nvfp4",
                          nullptr,
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

// A binary built for another PyTorch loads without complaint and corrupts memory, so ask first.
bool torch_matches() {
  pybind11::object version;
  try {
    version = pybind11::str(pybind11::module_::import("torch").attr("__version__"));
  } catch (pybind11::error_already_set& error) {
    error.restore();
    return false;
  }
  const auto found = version.cast<std::string>();
  if (found.rfind(HOTOP_TORCH_MINOR ".", 0) == 0) return true;
  PyErr_Format(PyExc_ImportError,
               "hotop._nvfp4 was built for PyTorch " HOTOP_TORCH_MINOR
               " but this is PyTorch %s; rebuild it with: " HOTOP_REBUILD_COMMAND,
               found.c_str());
  return false;
}

std::vector<at::Tensor> op_quantize(const at::Tensor& input, const at::Tensor& input_scale,
                                    int64_t scaling_vector_size, bool is_sf_swizzled_layout) {
  auto [packed, scales] =
      quantize(&active_kernels(), input, input_scale, scaling_vector_size, is_sf_swizzled_layout);
  return {std::move(packed), std::move(scales)};
}

std::vector<at::Tensor> op_quantize_trivial(const at::Tensor& input, const at::Tensor& input_scale,
                                            int64_t scaling_vector_size,
                                            bool is_sf_swizzled_layout) {
  auto [packed, scales] =
      quantize(nullptr, input, input_scale, scaling_vector_size, is_sf_swizzled_layout);
  return {std::move(packed), std::move(scales)};
}

template <Tactic tactic>
at::Tensor op_gemm(const at::Tensor& act_fp4, const at::Tensor& weight, const at::Tensor& act_sf,
                   const at::Tensor& weight_scale, const at::Tensor& alpha,
                   at::ScalarType output_dtype, bool, c10::string_view) {
  return gemm(tactic, act_fp4, weight, act_sf, weight_scale, alpha, output_dtype);
}

}  // namespace
}  // namespace hotop::nvfp4

#define HOTOP_QUANTIZE_SCHEMA                                       \
  "(Tensor input, Tensor input_scale, int scaling_vector_size=16, " \
  "bool is_sf_swizzled_layout=False) -> Tensor[]"
#define HOTOP_GEMM_SCHEMA                                                              \
  "(Tensor act_fp4, Tensor weight, Tensor act_sf, Tensor weight_scale, Tensor alpha, " \
  "ScalarType output_dtype, bool to_userbuffers=False, "                               \
  "str allowed_backends=\"cublaslt,blas,int8\") -> Tensor"

TORCH_LIBRARY(hotop_cpp, library) {
  library.def("tunable_fp4_quantize" HOTOP_QUANTIZE_SCHEMA);
  library.def("tunable_fp4_quantize_trivial" HOTOP_QUANTIZE_SCHEMA);
  library.def("nvfp4_gemm" HOTOP_GEMM_SCHEMA);
  library.def("nvfp4_gemm_trivial" HOTOP_GEMM_SCHEMA);
}

TORCH_LIBRARY_IMPL(hotop_cpp, CPU, library) {
  using namespace hotop::nvfp4;
  library.impl("tunable_fp4_quantize", op_quantize);
  library.impl("tunable_fp4_quantize_trivial", op_quantize_trivial);
  library.impl("nvfp4_gemm", op_gemm<Tactic::kAuto>);
  library.impl("nvfp4_gemm_trivial", op_gemm<Tactic::kTrivial>);
}

PyMODINIT_FUNC PyInit__nvfp4() {
  using namespace hotop::nvfp4;
  if (!torch_matches()) return nullptr;
  const char* isa = std::getenv("HOTOP_NVFP4_ISA");
  std::string error;
  if (isa != nullptr && *isa != '\0' && !set_isa(isa, error)) {
    PyErr_Format(PyExc_ImportError, "%s (asked for by HOTOP_NVFP4_ISA)", error.c_str());
    return nullptr;
  }
  return PyModule_Create(&definition);
}
