// SPDX-License-Identifier: Apache-2.0
// The fast path of a call that is known: about a microsecond besides two allocations and the
// launch.
#include "python/known_calls.h"

namespace magi::host {

namespace {

PyObject* not_known() {
  PyErr_Clear();  // whatever could not be read, the usual way reads it again and says what is wrong
  Py_RETURN_NONE;
}

// Equal beyond doubt, without running anybody's __eq__.
bool same_value(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) return PyFloat_AS_DOUBLE(a) == PyFloat_AS_DOUBLE(b);
  if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a))
    return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  if (!PyTuple_CheckExact(a) || PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
    PyObject *x = PyTuple_GET_ITEM(a, i), *y = PyTuple_GET_ITEM(b, i);
    if (PyTuple_CheckExact(x) || !same_value(x, y)) return false;
  }
  return true;
}

bool is_referent(const py::object& reference, PyObject* x) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference.ptr(), &found);
  Py_XDECREF(found);  // the caller of `find` holds x
#else
  PyObject* found = PyWeakref_GetObject(reference.ptr());
#endif
  return found == x;
}

bool number(PyObject* got, long long* out) {  // steals
  if (got == nullptr) return false;
  *out = PyLong_AsLongLong(got);
  Py_DECREF(got);
  return *out != -1 || !PyErr_Occurred();
}

bool truth(PyObject* got, bool* out) {  // steals
  if (got == nullptr) return false;
  *out = got != Py_False;
  Py_DECREF(got);
  return true;
}

}  // namespace

bool KnownCalls::bind(PyObject* const* args, Py_ssize_t count, PyObject* keywords,
                      PyObject** slots) const {
  const int total = static_cast<int>(names_.size());
  if (count > positional_) return false;
  for (int i = 0; i < total; ++i) slots[i] = i < count ? args[i] : nullptr;
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    // Names in source code are interned, so the address tells; those out of a configuration file
    // may not be.
    PyObject* name = PyTuple_GET_ITEM(keywords, i);
    int slot = 0;
    while (slot < total && names_[slot].ptr() != name) ++slot;
    if (slot == total) slot = 0;
    while (slot < total && !same_value(names_[slot].ptr(), name)) ++slot;
    if (slot == total || slots[slot] != nullptr) return false;
    slots[slot] = args[count + i];
  }
  for (int i = 0; i < total; ++i) {
    if (slots[i] == nullptr && (slots[i] = defaults_[i].ptr()) == nullptr) return false;
  }
  return true;
}

bool KnownCalls::needs_gradient(const Request& request, bool* needs) const {
  bool is_enabled = true;
  *needs = false;
  if (!truth(PyObject_CallNoArgs(torch_.is_grad_enabled.ptr()), &is_enabled)) return false;
  if (!is_enabled) return true;
  const PyGetSetDef* property = torch_.requires_grad;
  for (int slot : {q_, k_, v_, sink_}) {
    if (slot == sink_ && !request.has_sink) continue;
    if (!truth(property->get(request.slots[slot], property->closure), needs)) return false;
    if (*needs) return true;
  }
  return true;
}

bool KnownCalls::read_mask(Request* request) const {
  for (size_t i = 0; i < ranges_.size(); ++i) {
    PyObject* x = request->slots[ranges_[i]];
    if (x == Py_None && i == 2) {  // attn_type_map alone may be missing
      request->mask[i] = nullptr;
      continue;
    }
    const PyGetSetDef* property = torch_.version;
    if (!torch_.is_tensor(x) || !torch_.read(x, &request->ranges[i])) return false;
    // Inference tensors have no version: it raises, and they are never known.
    if (!number(property->get(x, property->closure), &request->versions[i])) return false;
    request->mask[i] = x;
  }
  return true;
}

bool KnownCalls::read(PyObject* const* args, Py_ssize_t count, PyObject* keywords,
                      Request* request) const {
  if (!bind(args, count, keywords, request->slots)) return false;
  PyObject *q = request->slots[q_], *k = request->slots[k_], *v = request->slots[v_],
           *sink = request->slots[sink_];
  request->has_sink = sink != Py_None;
  for (PyObject* x : {q, k, v}) {
    if (!torch_.is_tensor(x)) return false;
  }
  if (request->has_sink && !torch_.is_tensor(sink)) return false;
  bool needs_backward = true;
  // First: a mode would be told of every property that is read below.
  if (!torch_.is_quiet() || !needs_gradient(*request, &needs_backward) || needs_backward)
    return false;
  if (!read_mask(request)) return false;
  if (!torch_.read_values(q, &request->q) || !torch_.read_values(k, &request->k) ||
      !torch_.read_values(v, &request->v)) {
    return false;
  }
  const auto addresses = reinterpret_cast<uintptr_t>(request->q.data) |
                         reinterpret_cast<uintptr_t>(request->k.data) |
                         reinterpret_cast<uintptr_t>(request->v.data);
  if (addresses & 15) return false;  // the copy engine's unit; the usual way copies such tensors
  return !request->has_sink || torch_.read_values(sink, &request->sink);
}

bool KnownCalls::has_same_environment() const {
  for (size_t i = 0; i < watched_.size(); ++i) {
    PyObject* now = PyDict_GetItemWithError(environment_.ptr(), watched_[i].ptr());
    PyObject* then = texts_[i].ptr();
    if (now == then) continue;
    if (now == nullptr || then == nullptr || PyObject_RichCompareBool(now, then, Py_EQ) != 1)
      return false;
  }
  return true;
}

bool KnownCalls::is_true(const Mask& mask, const Request& request) const {
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const RangeState& then = mask.ranges[i];
    if (request.mask[i] == nullptr) continue;  // the key says that there was none
    if (!is_referent(then.reference, request.mask[i]) || then.version != request.versions[i] ||
        then.data != request.ranges[i].data || !then.layout.fits(request.ranges[i])) {
      return false;
    }
  }
  return true;
}

bool KnownCalls::has_same_options(const Call& call, PyObject* const* slots) const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (is_option_[i] && !same_value(call.options[i].ptr(), slots[i])) return false;
  }
  return true;
}

bool KnownCalls::has_same_tensors(const Call& call, const Request& request) const {
  return call.q.fits(request.q) && call.k.fits(request.k) && call.v.fits(request.v) &&
         call.has_sink == request.has_sink && (!call.has_sink || call.sink.fits(request.sink));
}

std::shared_ptr<Call> KnownCalls::look_up(const Request& request) const {
  const auto found = masks_.find(request.mask);
  if (found == masks_.end() || !has_same_environment() || !is_true(found->second, request))
    return nullptr;
  for (const std::shared_ptr<Call>& call : found->second.calls) {
    if (!has_same_tensors(*call, request) || !has_same_options(*call, request.slots)) continue;
    // Asking may run Python, which may change the memo: from here on only `kept` is used, unless we
    // go on.
    const std::shared_ptr<Call> kept = call;
    const uint64_t changes = num_changes_;
    long long device = 0, stream = 0;
    bool is_capturing = true;
    if (!number(PyObject_CallNoArgs(kept->current_device.ptr()), &device)) return nullptr;
    if (!number(PyObject_CallOneArg(kept->stream_of.ptr(), kept->index.ptr()), &stream))
      return nullptr;
    if (device != kept->device_index) return nullptr;
    if (stream == reinterpret_cast<intptr_t>(kept->params.stream)) {
      const bool is_asked = truth(PyObject_CallNoArgs(kept->is_capturing.ptr()), &is_capturing);
      return is_asked && !is_capturing ? kept : nullptr;
    }
    if (changes != num_changes_) return nullptr;
  }
  return nullptr;
}

PyObject* KnownCalls::result_of(const py::object& out, const py::object& lse,
                                const py::object& max_logits) const {
  // As `object.__new__` and two assignments: what the dataclass's own __init__ does, in a third of
  // the time.
  static PyObject* nothing = PyTuple_New(0);
  auto* type = reinterpret_cast<PyTypeObject*>(result_.ptr());
  auto meta = py::reinterpret_steal<py::object>(PyBaseObject_Type.tp_new(type, nothing, nullptr));
  if (!meta || PyObject_SetAttr(meta.ptr(), lse_name_.ptr(), lse.ptr()) != 0 ||
      PyObject_SetAttr(meta.ptr(), max_logits_name_.ptr(), max_logits.ptr()) != 0) {
    return nullptr;
  }
  return PyTuple_Pack(2, out.ptr(), meta.ptr());
}

PyObject* KnownCalls::launch(const Call& call, const Request& request) const {
  const auto empty_like = [this](const py::object& like) {
    return py::reinterpret_steal<py::object>(
        PyObject_CallOneArg(torch_.empty_like.ptr(), like.ptr()));
  };
  py::object out = empty_like(call.out_like);
  py::object lse = out ? empty_like(call.lse_like) : py::object();
  py::object max_logits = py::none();
  if (lse && !call.make_max_logits.is_none()) {
    max_logits = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(call.make_max_logits.ptr()));
  }
  if (!out || !lse || !max_logits) return nullptr;  // such as out of memory
  magi_ffa_fwd_params params = call.params;
  params.q = request.q.data;
  params.k = request.k.data;
  params.v = request.v.data;
  params.sink = static_cast<const float*>(request.has_sink ? request.sink.data : nullptr);
  dlpack::Tensor view;
  if (!torch_.read(out.ptr(), &view))
    return not_known();  // a transform wrapped it: no memory of its own
  params.out = view.data;
  if (!torch_.read(lse.ptr(), &view)) return not_known();
  params.lse = static_cast<float*>(view.data);
  params.max_logits = nullptr;
  if (!max_logits.is_none()) {
    if (!torch_.read(max_logits.ptr(), &view)) return not_known();
    params.max_logits = static_cast<float*>(view.data);
  }
  const magi_status status = call.launch(&params);
  if (status == MAGI_OK) return result_of(out, lse, max_logits);
  PyObject* said =
      PyObject_CallFunction(call.check.ptr(), "is", static_cast<int>(status), "Attention forward");
  return said;  // nullptr: it raised, which is what it is for
}

PyObject* KnownCalls::find(PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  if (masks_.empty()) Py_RETURN_NONE;
  Request request;
  if (!read(args, count, keywords, &request)) return not_known();
  const std::shared_ptr<Call> call = look_up(request);
  return call ? launch(*call, request) : not_known();
}

}  // namespace magi::host
