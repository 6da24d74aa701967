// Owning PyObject pointer: one reference, released when the object goes out of scope.
#pragma once

#include <Python.h>

#include <utility>

namespace hotop {

class PyRef {
 public:
  PyRef() = default;
  ~PyRef() {
    if (object_ == nullptr) return;
    // At exit CPython unwinds daemon threads that have no GIL: then nothing may be freed.
    if (Py_REFCNT(object_) == 1 && !PyGILState_Check()) return;
    Py_DECREF(object_);
  }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(old);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;

  static PyRef steal(PyObject* object) { return PyRef(object); }
  static PyRef borrow(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

}  // namespace hotop
