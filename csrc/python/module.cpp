// SPDX-License-Identifier: Apache-2.0
// The Python module `_magi_host`: prepared launches. Knows torch by DLPack and by Python objects,
// not by its headers.
#include "python/known_calls.h"

#ifdef Py_GIL_DISABLED
#error \
    "This module relies on the GIL; build it for a Python with one. Without it calls take the usual way."
#endif

namespace py = pybind11;
using magi::host::KnownCalls;

namespace {

// Goes with HOST_VERSION of magi_attention/native/abi.py: raised with every change of what Python
// sees here.
constexpr int kHostVersion = 1;
constexpr const char* kCapsuleName = "magi_attention.known_calls.self";

using Method = PyObject* (KnownCalls::*)(PyObject* const*, Py_ssize_t, PyObject*);

template <Method method>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  auto* memo = static_cast<std::shared_ptr<KnownCalls>*>(PyCapsule_GetPointer(self, kCapsuleName));
  if (memo == nullptr) return nullptr;
  try {
    return ((**memo).*method)(args, count, keywords);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <Method method>
PyCFunction as_c_function() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<method>));
}

PyMethodDef methods[] = {
    {"find", as_c_function<&KnownCalls::find>(), METH_FASTCALL | METH_KEYWORDS,
     "(out, meta) of a call that ran before with equal arguments, launched; None if it is not "
     "known."},
    {"remember", as_c_function<&KnownCalls::remember>(), METH_FASTCALL | METH_KEYWORDS,
     "Keeps a call that took the usual way, if it can be prepared. Returns None."},
};

// pybind11 converts arguments, which takes longer than all that `find` does: these are bare
// functions of Python's C API.
py::object bare_function(const std::shared_ptr<KnownCalls>& memo, PyMethodDef* method) {
  py::capsule self(new std::shared_ptr<KnownCalls>(memo), kCapsuleName, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<KnownCalls>*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(method, self.ptr()));
}

}  // namespace

PYBIND11_MODULE(_magi_host, module) {
  module.doc() = "Prepared launches of magi_attention.";
  module.attr("abi_version") = MAGI_ABI_VERSION;
  module.attr("host_version") = kHostVersion;
  py::class_<KnownCalls, std::shared_ptr<KnownCalls>>(module, "KnownCalls")
      .def(py::init<const py::object&, const py::sequence&, int, const py::sequence&,
                    const py::dict&, const py::sequence&, py::object, py::object>(),
           py::kw_only(), py::arg("hooks"), py::arg("signature"), py::arg("positional"),
           py::arg("ignored"), py::arg("environment"), py::arg("watched"), py::arg("result"),
           py::arg("prepare"))
      .def_property_readonly(
          "find",
          [](const std::shared_ptr<KnownCalls>& x) { return bare_function(x, &methods[0]); })
      .def_property_readonly(
          "remember",
          [](const std::shared_ptr<KnownCalls>& x) { return bare_function(x, &methods[1]); })
      .def("forget_all", &KnownCalls::forget_all)
      .def("__len__", &KnownCalls::size);
}
