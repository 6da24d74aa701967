// Everything that differs between CPython versions, and the compiler hints.
#pragma once

#include <Python.h>

#ifdef Py_GIL_DISABLED
#error "hotop needs CPython's GIL, and this is the free-threaded build; use the ordinary one"
#endif

#define HOTOP_LIKELY(x) __builtin_expect(!!(x), 1)
#define HOTOP_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define HOTOP_COLD __attribute__((cold, noinline))
#define HOTOP_INLINE inline __attribute__((always_inline))

// CPython declares these in headers that only its own sources may include.
extern "C" PyObject* _PyEval_EvalFrameDefault(PyThreadState*, struct _PyInterpreterFrame*, int);

namespace hotop {

// True when an exact int surely fits int64: at most two 30-bit digits. A miss asks the slow check.
HOTOP_INLINE bool surely_int64(PyObject* value) {
#if PY_VERSION_HEX >= 0x030C0000
  return (reinterpret_cast<PyLongObject*>(value)->long_value.lv_tag >> 3) <= 2;
#else
  const Py_ssize_t size = Py_SIZE(value);
  return size >= -2 && size <= 2;
#endif
}

HOTOP_INLINE bool fits_int64(PyObject* value) {
  if (HOTOP_LIKELY(surely_int64(value))) return true;
  int overflow = 0;
  PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

// Dynamo replaces the interpreter's frame evaluator while any thread has a callback.
HOTOP_INLINE bool frame_evaluator_replaced(PyInterpreterState* interpreter) {
  return reinterpret_cast<void*>(_PyInterpreterState_GetEvalFrameFunc(interpreter)) !=
         reinterpret_cast<void*>(&_PyEval_EvalFrameDefault);
}

}  // namespace hotop
