// SPDX-License-Identifier: Apache-2.0
// Least weighted vertex cover of a bipartite graph, by König's theorem from a maximum flow (Dinic,
// 1970): source -> left vertices -> right vertices -> sink, where only the ends have capacities,
// the weights. In the residual graph of a maximum flow a left vertex is chosen if the source does
// not reach it, a right vertex if it does.
#include <algorithm>
#include <exception>
#include <vector>

#include "planner/status.h"

namespace magi {
namespace {

// Vertices: left ones first, right ones behind. An edge carries flow from left to right, any
// amount; what it carries can be taken back.
class CoverFlow {
 public:
  CoverFlow(int32_t num_left, int32_t num_right, const int64_t* left_weights,
            const int64_t* right_weights, int64_t num_edges, const int32_t* left,
            const int32_t* right)
      : num_left_(num_left), left_(left), right_(right) {
    const size_t n = size_t(num_left) + size_t(num_right);
    rest_.assign(left_weights, left_weights + num_left);
    rest_.insert(rest_.end(), right_weights, right_weights + num_right);
    flow_.assign(size_t(num_edges), 0);
    begin_.assign(n + 1, 0);
    for (int64_t e = 0; e < num_edges; ++e) {
      ++begin_[size_t(left[e]) + 1];
      ++begin_[size_t(num_left) + size_t(right[e]) + 1];
    }
    for (size_t v = 0; v < n; ++v) begin_[v + 1] += begin_[v];
    edges_.resize(2 * size_t(num_edges));
    std::vector<int64_t> at(begin_.begin(), begin_.end() - 1);
    for (int64_t e = 0; e < num_edges; ++e) {
      edges_[size_t(at[size_t(left[e])]++)] = e;
      edges_[size_t(at[size_t(num_left) + size_t(right[e])]++)] = e;
    }
    level_.resize(n);
    next_.resize(n);
  }

  void run() {
    while (find_levels()) {
      std::copy(begin_.begin(), begin_.end() - 1, next_.begin());
      for (int32_t v = 0; v < num_left_; ++v)
        while (rest_[size_t(v)] > 0 && push(v)) {
        }
    }
  }

  // After run: does the source reach the vertex?
  bool is_reached(size_t v) const { return level_[v] >= 0; }

 private:
  bool is_left(size_t v) const { return v < size_t(num_left_); }
  size_t other(size_t v, int64_t e) const {
    return is_left(v) ? size_t(num_left_) + size_t(right_[e]) : size_t(left_[e]);
  }
  bool can_pass(size_t v, int64_t e) const { return is_left(v) || flow_[size_t(e)] > 0; }

  // Distances from the source; false if the sink is not reached.
  bool find_levels() {
    std::fill(level_.begin(), level_.end(), -1);
    queue_.clear();
    for (size_t v = 0; v < size_t(num_left_); ++v)
      if (rest_[v] > 0) {
        level_[v] = 0;
        queue_.push_back(v);
      }
    bool found = false;
    for (size_t at = 0; at < queue_.size(); ++at) {
      const size_t v = queue_[at];
      if (!is_left(v) && rest_[v] > 0) found = true;
      for (int64_t i = begin_[v]; i < begin_[v + 1]; ++i) {
        const int64_t e = edges_[size_t(i)];
        const size_t w = other(v, e);
        if (level_[w] >= 0 || !can_pass(v, e)) continue;
        level_[w] = level_[v] + 1;
        queue_.push_back(w);
      }
    }
    return found;
  }

  // One path of shortest length from a left vertex to the sink; false if there is none left.
  bool push(int32_t from) {
    path_.clear();
    size_t v = size_t(from);
    while (true) {
      if (!is_left(v) && rest_[v] > 0) return augment(size_t(from), v);
      bool stepped = false;
      for (int64_t& i = next_[v]; i < begin_[v + 1]; ++i) {
        const int64_t e = edges_[size_t(i)];
        const size_t w = other(v, e);
        if (level_[w] != level_[v] + 1 || !can_pass(v, e)) continue;
        path_.push_back(e);
        v = w;
        stepped = true;
        break;
      }
      if (stepped) continue;
      if (path_.empty()) return false;
      v = other(v, path_.back());  // back by the edge that led here, which leads nowhere
      path_.pop_back();
      ++next_[v];
    }
  }

  bool augment(size_t from, size_t to) {
    int64_t amount = std::min(rest_[from], rest_[to]);
    bool is_forward = true;
    for (const int64_t e : path_) {
      if (!is_forward) amount = std::min(amount, flow_[size_t(e)]);
      is_forward = !is_forward;
    }
    is_forward = true;
    for (const int64_t e : path_) {
      flow_[size_t(e)] += is_forward ? amount : -amount;
      is_forward = !is_forward;
    }
    rest_[from] -= amount;
    rest_[to] -= amount;
    return true;
  }

  int32_t num_left_;
  const int32_t *left_, *right_;
  std::vector<int64_t> rest_;  // of the capacity between a vertex and the source or the sink
  std::vector<int64_t> flow_, begin_, edges_, next_, path_;
  std::vector<int32_t> level_;
  std::vector<size_t> queue_;
};

magi_status check_graph(int32_t num_left, int32_t num_right, const int64_t* left_weights,
                        const int64_t* right_weights, int64_t num_edges, const int32_t* left,
                        const int32_t* right) {
  if (num_left < 0 || num_right < 0 || num_edges < 0)
    return fail(MAGI_INVALID_ARGUMENT, "A graph of %d and %d vertices with %lld edges; give >= 0.",
                num_left, num_right, static_cast<long long>(num_edges));
  for (int64_t e = 0; e < num_edges; ++e)
    if (left[e] < 0 || left[e] >= num_left || right[e] < 0 || right[e] >= num_right)
      return fail(MAGI_INVALID_ARGUMENT,
                  "Edge %lld leads from %d to %d, beyond %d and %d vertices.",
                  static_cast<long long>(e), left[e], right[e], num_left, num_right);
  const auto is_bad = [](int64_t weight) { return weight < 0 || weight > (int64_t(1) << 60); };
  if (std::any_of(left_weights, left_weights + num_left, is_bad) ||
      std::any_of(right_weights, right_weights + num_right, is_bad))
    return fail(MAGI_INVALID_ARGUMENT, "A weight is negative or above 2^60.");
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

extern "C" magi_status magi_vertex_cover(int32_t num_left, int32_t num_right,
                                         const int64_t* left_weights, const int64_t* right_weights,
                                         int64_t num_edges, const int32_t* left,
                                         const int32_t* right, uint8_t* left_chosen,
                                         uint8_t* right_chosen) {
  const magi_status status =
      magi::check_graph(num_left, num_right, left_weights, right_weights, num_edges, left, right);
  if (status != MAGI_OK) return status;
  try {
    magi::CoverFlow flow(num_left, num_right, left_weights, right_weights, num_edges, left, right);
    flow.run();
    for (int32_t v = 0; v < num_left; ++v) left_chosen[v] = !flow.is_reached(size_t(v));
    for (int32_t v = 0; v < num_right; ++v)
      right_chosen[v] = flow.is_reached(size_t(num_left) + size_t(v));
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "A vertex cover needs more memory: %s.", error.what());
  }
  return MAGI_OK;
}
