// SPDX-License-Identifier: Apache-2.0
// A memo of attention calls that ran before: what they were given, and the launch that it came to.
//
// `find` gets the arguments of the public function and either launches and returns the result, or
// returns None, which means: not known, take the usual way. Only the usual way checks arguments and
// says what is wrong with them, so every doubt here is a None. `remember` is told the arguments of
// a call that went the usual way and asks Python to prepare the launch. Everything happens under
// the GIL.
#ifndef MAGI_PYTHON_KNOWN_CALLS_H
#define MAGI_PYTHON_KNOWN_CALLS_H

#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "magi/abi.h"
#include "python/dlpack.h"

namespace magi::host {

namespace py = pybind11;

constexpr int kMaxParameters = 40;
constexpr int kMaxDims = 3;
constexpr size_t kMaxCalls = 1024;

// Shape, strides, dtype and device of a tensor.
struct Layout {
  dlpack::Device device;
  dlpack::DataType dtype;
  int32_t ndim;
  int64_t shape[kMaxDims], strides[kMaxDims];

  static Layout of(const dlpack::Tensor& tensor);
  bool fits(const dlpack::Tensor& tensor) const;
};

// One tensor of a mask as it was when its plan was made. Any difference means that the plan may be
// wrong.
struct RangeState {
  py::object reference;  // weak; none where the mask has no such tensor
  long long version;     // torch counts in-place edits
  const void* data;
  Layout layout;
};

// What a launch needs besides addresses of tensors, and when it may be used.
struct Call {
  std::vector<py::object> options;  // plain values by slot; empty objects at slots of tensors
  Layout q, k, v, sink;
  bool has_sink;
  magi_ffa_fwd_params params;
  magi_status (*launch)(const magi_ffa_fwd_params*);
  long long device_index;
  py::object stream_of, current_device, is_capturing, index;
  py::object out_like, lse_like, make_max_logits, check;
  py::object held;  // plan and workspace: what `params` points to
};

// A mask, and the calls with it.
struct Mask {
  std::array<RangeState, 3> ranges;
  std::vector<std::shared_ptr<Call>> calls;
};

using MaskKey = std::array<PyObject*, 3>;  // q_ranges, k_ranges, attn_type_map or nullptr

struct MaskKeyHash {
  size_t operator()(const MaskKey& key) const {
    size_t hash = 0;
    for (PyObject* part : key)
      hash = hash * 0x9e3779b97f4a7c15u + (reinterpret_cast<size_t>(part) >> 4);
    return hash ^ (hash >> 29);
  }
};

// The arguments of one call, read but not owned.
struct Request {
  PyObject* slots[kMaxParameters];
  dlpack::Tensor q, k, v, sink;
  std::array<dlpack::Tensor, 3> ranges;
  std::array<long long, 3> versions;
  MaskKey mask;
  bool has_sink;
};

// What is asked of torch, resolved once. See `TorchHooks` of
// magi_attention/kernels/ffa/launch_cache.py.
struct Torch {
  const dlpack::ExchangeApi* api;
  py::object tensor, parameter;  // types
  py::object empty_like, is_grad_enabled;
  struct Answer {
    py::object ask, expected;
  };
  struct Entry {
    py::dict dict;
    py::object key, expected;
  };
  std::vector<Answer> answers;  // calls without arguments that must give that very object
  std::vector<Entry> entries;   // dictionary entries that must be that very object
  PyGetSetDef* version;
  PyGetSetDef* requires_grad;
  PyMethodDef* is_neg;

  explicit Torch(const py::object& hooks);
  bool is_tensor(PyObject* x) const;
  bool is_quiet() const;  // no mode, no transform: a call means what it says
  bool read(PyObject* tensor, dlpack::Tensor* out) const;
  bool read_values(PyObject* tensor,
                   dlpack::Tensor* out) const;  // of which a kernel may read the memory as it is
};

class KnownCalls : public std::enable_shared_from_this<KnownCalls> {
 public:
  // `signature`: (name, default or the class `inspect.Parameter.empty`) of every parameter; the
  // first `positional` of them may be given by position. `ignored`: names of hints that never
  // change a launch.
  KnownCalls(const py::object& hooks, const py::sequence& signature, int positional,
             const py::sequence& ignored, const py::dict& environment, const py::sequence& watched,
             py::object result, py::object prepare);

  // New references, or nullptr with a Python exception.
  PyObject* find(PyObject* const* args, Py_ssize_t count, PyObject* keywords);
  PyObject* remember(PyObject* const* args, Py_ssize_t count, PyObject* keywords);

  void forget_all();
  void forget_dead(PyObject* reference);  // the tensor behind this weak reference is gone
  size_t size() const { return num_calls_; }

 private:
  bool bind(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** slots) const;
  bool read(PyObject* const* args, Py_ssize_t count, PyObject* keywords, Request* request) const;
  bool read_mask(Request* request) const;
  bool needs_gradient(const Request& request, bool* needs) const;
  bool has_same_environment() const;
  void take_environment();
  bool is_true(const Mask& mask, const Request& request) const;
  bool has_same_options(const Call& call, PyObject* const* slots) const;
  bool has_same_tensors(const Call& call, const Request& request) const;
  std::shared_ptr<Call> look_up(const Request& request) const;
  std::shared_ptr<Call> describe(const Request& request) const;
  py::object prepare(const Request& request) const;
  bool is_plain(const Request& request) const;
  void add(const Request& request, std::shared_ptr<Call> call, std::array<RangeState, 3> ranges);
  void fill(Call* call, const py::object& prepared) const;
  std::array<RangeState, 3> state_of(const Request& request) const;
  void forget(const MaskKey& key);
  PyObject* launch(const Call& call, const Request& request) const;
  PyObject* result_of(const py::object& out, const py::object& lse,
                      const py::object& max_logits) const;

  Torch torch_;
  std::vector<py::object> names_, defaults_;
  std::vector<bool> is_option_;
  int positional_;
  int q_, k_, v_, sink_;
  std::array<int, 3> ranges_;
  py::dict environment_;
  std::vector<py::object> watched_, texts_;  // texts_: null where unset
  py::object result_, prepare_, lse_name_, max_logits_name_;
  std::unordered_map<MaskKey, Mask, MaskKeyHash> masks_;
  std::unordered_map<PyObject*, MaskKey> by_reference_;
  size_t num_calls_ = 0;
  uint64_t num_changes_ = 0;  // tells a loop that the memo changed under it
};

}  // namespace magi::host

#endif  // MAGI_PYTHON_KNOWN_CALLS_H
