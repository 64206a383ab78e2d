// SPDX-License-Identifier: Apache-2.0
// How the memo looks at torch: tensors by the DLPack table, everything else by Python objects
// resolved once.
#include <string.h>

#include "python/known_calls.h"

namespace magi::host {

namespace {

// The C getter behind a property that torch defines in C: 10 ns where looking the name up on the
// type takes 40.
PyGetSetDef* getter(const py::object& tensor, const py::object& parameter, const char* name) {
  py::object found = tensor.attr(name), same = parameter.attr(name);
  if (Py_TYPE(found.ptr()) != &PyGetSetDescr_Type || !found.is(same)) {
    throw py::value_error(std::string("torch.Tensor.") + name +
                          " is no property defined in C in this torch.");
  }
  return reinterpret_cast<PyGetSetDescrObject*>(found.ptr())
      ->d_getset;  // lives as long as the type
}

PyMethodDef* method(const py::object& tensor, const char* name) {
  py::object found = tensor.attr(name);
  if (Py_TYPE(found.ptr()) == &PyMethodDescr_Type) {
    PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
    if (definition->ml_flags == METH_NOARGS) return definition;
  }
  throw py::value_error(std::string("torch.Tensor.") + name +
                        " is no method defined in C in this torch.");
}

const dlpack::ExchangeApi* exchange_api(const py::object& capsule) {
  auto* api =
      static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  if (api->version.major != dlpack::kMajorVersion ||
      api->dltensor_from_py_object_no_sync == nullptr) {
    throw py::value_error(
        "the DLPack table of this torch has version " + std::to_string(api->version.major) +
        " or lacks a function; version 1 with dltensor_from_py_object_no_sync is understood.");
  }
  return api;
}

}  // namespace

Layout Layout::of(const dlpack::Tensor& tensor) {
  Layout layout;
  memset(&layout, 0, sizeof layout);
  layout.device = tensor.device;
  layout.dtype = tensor.dtype;
  layout.ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) {
    layout.shape[i] = tensor.shape[i];
    layout.strides[i] = tensor.strides[i];
  }
  return layout;
}

bool Layout::fits(const dlpack::Tensor& tensor) const {
  if (tensor.ndim != ndim || tensor.device.id != device.id || tensor.device.type != device.type)
    return false;
  if (memcmp(&tensor.dtype, &dtype, sizeof dtype) != 0) return false;
  for (int i = 0; i < ndim; ++i) {
    if (tensor.shape[i] != shape[i] || tensor.strides[i] != strides[i]) return false;
  }
  return true;
}

Torch::Torch(const py::object& hooks)
    : api(exchange_api(hooks.attr("exchange_api"))),
      tensor(hooks.attr("tensor")),
      parameter(hooks.attr("parameter")),
      empty_like(hooks.attr("empty_like")),
      is_grad_enabled(hooks.attr("is_grad_enabled")),
      version(getter(tensor, parameter, "_version")),
      requires_grad(getter(tensor, parameter, "requires_grad")),
      is_neg(method(tensor, "is_neg")) {
  for (py::handle row : hooks.attr("answers")) {
    auto pair = py::reinterpret_borrow<py::sequence>(row);
    answers.push_back({pair[0], pair[1]});
  }
  for (py::handle row : hooks.attr("entries")) {
    auto triple = py::reinterpret_borrow<py::sequence>(row);
    entries.push_back({py::dict(triple[0]), triple[1], triple[2]});
  }
}

bool Torch::is_tensor(PyObject* x) const {
  // Subclasses are out: they may do anything when touched.
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == tensor.ptr() || type == parameter.ptr();
}

bool Torch::is_quiet() const {
  for (const Answer& answer : answers) {
    PyObject* got = PyObject_CallNoArgs(answer.ask.ptr());
    if (got == nullptr) return false;
    Py_DECREF(got);  // compared as an address only: what is expected is held
    if (got != answer.expected.ptr()) return false;
  }
  for (const Entry& entry : entries) {
    if (PyDict_GetItemWithError(entry.dict.ptr(), entry.key.ptr()) != entry.expected.ptr())
      return false;
  }
  return true;
}

bool Torch::read(PyObject* x, dlpack::Tensor* out) const {
  if (api->dltensor_from_py_object_no_sync(x, out) != 0) return false;
  out->data = static_cast<char*>(out->data) + out->byte_offset;
  return out->ndim <= kMaxDims;
}

bool Torch::read_values(PyObject* x, dlpack::Tensor* out) const {
  // Tensors of torch may be the negative of their memory, or zeros without memory; DLPack tells
  // neither.
  PyObject* is_negated = is_neg->ml_meth(x, nullptr);
  Py_XDECREF(is_negated);
  return is_negated == Py_False && read(x, out) && out->data != nullptr;
}

}  // namespace magi::host
