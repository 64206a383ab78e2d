// SPDX-License-Identifier: Apache-2.0
// The slow half of the memo: what is kept of a call that took the usual way, and when it is dropped
// again.
#include <string.h>

#include "python/known_calls.h"

namespace magi::host {

namespace {

constexpr const char* kSelfName = "magi_attention.known_calls";

// Called by Python when a tensor of a mask dies; `self` is a capsule of a weak pointer to the memo.
PyObject* on_death(PyObject* self, PyObject* reference) {
  auto* memo = static_cast<std::weak_ptr<KnownCalls>*>(PyCapsule_GetPointer(self, kSelfName));
  if (memo == nullptr) return nullptr;
  const py::object kept = py::reinterpret_borrow<py::object>(reference);
  if (const std::shared_ptr<KnownCalls> alive = memo->lock()) alive->forget_dead(reference);
  Py_RETURN_NONE;
}

PyMethodDef on_death_method = {"forget", on_death, METH_O, nullptr};

py::object death_callback(std::weak_ptr<KnownCalls> memo) {
  py::capsule self(
      new std::weak_ptr<KnownCalls>(std::move(memo)), kSelfName, [](PyObject* capsule) {
        delete static_cast<std::weak_ptr<KnownCalls>*>(PyCapsule_GetPointer(capsule, kSelfName));
      });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&on_death_method, self.ptr()));
}

// A value that `same_value` can compare.
bool is_plain_value(PyObject* x, bool may_be_tuple = true) {
  if (x == Py_None || PyBool_Check(x) || PyLong_CheckExact(x) || PyUnicode_CheckExact(x))
    return true;
  if (PyFloat_CheckExact(x)) return PyFloat_AS_DOUBLE(x) == PyFloat_AS_DOUBLE(x);
  if (!may_be_tuple || !PyTuple_CheckExact(x)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i) {
    if (!is_plain_value(PyTuple_GET_ITEM(x, i), false)) return false;
  }
  return true;
}

bool is_contiguous_float32(const dlpack::Tensor& x) {
  int64_t stride = 1;
  for (int i = x.ndim - 1; i >= 0; --i) {
    if (x.shape[i] != 1 && x.strides[i] != stride) return false;
    stride *= x.shape[i];
  }
  return x.dtype.code == dlpack::kFloat && x.dtype.bits == 32 && x.dtype.lanes == 1 && stride > 0;
}

template <typename Pointer>
Pointer address(const py::object& integer) {
  return reinterpret_cast<Pointer>(integer.cast<uintptr_t>());
}

}  // namespace

KnownCalls::KnownCalls(const py::object& hooks, const py::sequence& signature, int positional,
                       const py::sequence& ignored, const py::dict& environment,
                       const py::sequence& watched, py::object result, py::object prepare)
    : torch_(hooks),
      positional_(positional),
      environment_(environment),
      result_(std::move(result)),
      prepare_(std::move(prepare)),
      lse_name_(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("lse"))),
      max_logits_name_(
          py::reinterpret_steal<py::object>(PyUnicode_InternFromString("max_logits"))) {
  const auto empty = py::module_::import("inspect").attr("Parameter").attr("empty");
  for (py::handle row : signature) {
    auto pair = py::reinterpret_borrow<py::sequence>(row);
    PyObject* name = py::object(pair[0]).release().ptr();
    PyUnicode_InternInPlace(&name);
    names_.push_back(py::reinterpret_steal<py::object>(name));
    py::object value = pair[1];
    defaults_.push_back(value.is(empty) ? py::object() : value);
  }
  if (names_.size() > kMaxParameters)
    throw py::value_error("too many parameters; raise kMaxParameters.");
  is_option_.assign(names_.size(), true);
  const auto slot_of = [this](const py::object& name) {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (!names_[i].equal(name)) continue;
      is_option_[i] = false;
      return static_cast<int>(i);
    }
    throw py::value_error("the signature has no parameter " + name.cast<std::string>() + ".");
  };
  q_ = slot_of(py::str("q"));
  k_ = slot_of(py::str("k"));
  v_ = slot_of(py::str("v"));
  sink_ = slot_of(py::str("sink"));
  ranges_ = {slot_of(py::str("q_ranges")), slot_of(py::str("k_ranges")),
             slot_of(py::str("attn_type_map"))};
  for (py::handle name : ignored) slot_of(py::reinterpret_borrow<py::object>(name));
  for (py::handle key : watched) watched_.push_back(py::reinterpret_borrow<py::object>(key));
  texts_.resize(watched_.size());
}

void KnownCalls::take_environment() {
  for (size_t i = 0; i < watched_.size(); ++i) {
    PyObject* text = PyDict_GetItemWithError(environment_.ptr(), watched_[i].ptr());
    texts_[i] = py::reinterpret_borrow<py::object>(text);
  }
}

bool KnownCalls::is_plain(const Request& request) const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (is_option_[i] && !is_plain_value(request.slots[i])) return false;
  }
  return !request.has_sink || is_contiguous_float32(request.sink);
}

std::shared_ptr<Call> KnownCalls::describe(const Request& request) const {
  auto call = std::make_shared<Call>();
  for (size_t i = 0; i < names_.size(); ++i) {
    call->options.push_back(is_option_[i] ? py::reinterpret_borrow<py::object>(request.slots[i])
                                          : py::object());
  }
  call->q = Layout::of(request.q);
  call->k = Layout::of(request.k);
  call->v = Layout::of(request.v);
  call->has_sink = request.has_sink;
  if (request.has_sink) call->sink = Layout::of(request.sink);
  return call;
}

std::array<RangeState, 3> KnownCalls::state_of(const Request& request) const {
  std::array<RangeState, 3> states{};
  for (size_t i = 0; i < states.size(); ++i) {
    if (request.mask[i] == nullptr) continue;
    states[i].version = request.versions[i];
    states[i].data = request.ranges[i].data;
    states[i].layout = Layout::of(request.ranges[i]);
  }
  return states;
}

py::object KnownCalls::prepare(const Request& request) const {
  py::dict arguments;
  for (size_t i = 0; i < names_.size(); ++i) arguments[names_[i]] = py::handle(request.slots[i]);
  return prepare_(**arguments);
}

void KnownCalls::fill(Call* call, const py::object& prepared) const {
  const auto prefix = prepared.attr("prefix").cast<std::string>();
  if (prefix.size() != offsetof(magi_ffa_fwd_params, q))
    throw py::value_error("the prefix has another size.");
  memset(&call->params, 0, sizeof call->params);
  memcpy(&call->params, prefix.data(), prefix.size());
  call->params.plan = address<const int32_t*>(prepared.attr("plan_address"));
  call->params.workspace = address<int32_t*>(prepared.attr("workspace_address"));
  call->params.stream = address<void*>(prepared.attr("stream"));
  call->launch =
      address<magi_status (*)(const magi_ffa_fwd_params*)>(prepared.attr("launch_address"));
  call->index = prepared.attr("device_index");
  call->device_index = call->index.cast<long long>();
  const py::object runtime = prepared.attr("runtime");
  call->stream_of = runtime.attr("stream");
  call->current_device = runtime.attr("current_device");
  call->is_capturing = runtime.attr("is_capturing");
  call->out_like = prepared.attr("out_like");
  call->lse_like = prepared.attr("lse_like");
  call->make_max_logits = prepared.attr("make_max_logits");
  call->check = prepared.attr("check");
  call->held = py::make_tuple(prepared.attr("plan"), prepared.attr("workspace"));
}

void KnownCalls::add(const Request& request, std::shared_ptr<Call> call,
                     std::array<RangeState, 3> ranges) {
  if (num_calls_ >= kMaxCalls || !has_same_environment()) forget_all();
  take_environment();
  auto found = masks_.find(request.mask);
  if (found != masks_.end() && !is_true(found->second, request)) {
    forget(request.mask);  // plans of what these tensors held before
    found = masks_.end();
  }
  if (found == masks_.end()) {
    const py::object callback = death_callback(weak_from_this());
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (request.mask[i] == nullptr) continue;
      PyObject* reference = PyWeakref_NewRef(request.mask[i], callback.ptr());
      if (reference == nullptr) throw py::error_already_set();
      ranges[i].reference = py::reinterpret_steal<py::object>(reference);
    }
    // Nothing from here to the end runs Python.
    for (const RangeState& range : ranges) {
      if (range.reference) by_reference_[range.reference.ptr()] = request.mask;
    }
    found = masks_.emplace(request.mask, Mask{std::move(ranges), {}}).first;
  }
  found->second.calls.push_back(std::move(call));
  ++num_calls_;
  ++num_changes_;
}

PyObject* KnownCalls::remember(PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Request request;
  if (!read(args, count, keywords, &request) || !is_plain(request)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  // Read before Python prepares the launch: an edit of the mask meanwhile makes the entry useless,
  // never wrong.
  std::shared_ptr<Call> call = describe(request);
  std::array<RangeState, 3> ranges = state_of(request);
  const py::object prepared = prepare(request);
  if (prepared.is_none()) Py_RETURN_NONE;
  fill(call.get(), prepared);
  Request
      again;  // preparing may have let other threads run, and the sizes of a tensor lie inside it
  const bool is_same = read(args, count, keywords, &again) && has_same_tensors(*call, again) &&
                       again.versions == request.versions && look_up(again) == nullptr;
  PyErr_Clear();
  if (is_same) add(again, std::move(call), std::move(ranges));
  Py_RETURN_NONE;
}

void KnownCalls::forget(const MaskKey& key) {
  const auto found = masks_.find(key);
  if (found == masks_.end()) return;
  // Taken out first: what dies with it may be the last reference to objects whose end runs Python.
  const Mask mask = std::move(found->second);
  masks_.erase(found);
  for (const RangeState& range : mask.ranges) {
    if (range.reference) by_reference_.erase(range.reference.ptr());
  }
  num_calls_ -= mask.calls.size();
  ++num_changes_;
}

void KnownCalls::forget_dead(PyObject* reference) {
  const auto found = by_reference_.find(reference);
  if (found == by_reference_.end()) return;
  const MaskKey key = found->second;
  forget(key);
}

void KnownCalls::forget_all() {
  decltype(masks_) masks;
  masks.swap(masks_);
  by_reference_.clear();
  num_calls_ = 0;
  ++num_changes_;
}

}  // namespace magi::host
