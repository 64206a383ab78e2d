// SPDX-License-Identifier: Apache-2.0
// The schedule of a backward, simulated on the host: when work tiles start, and which tiles follow
// one another.
#include <algorithm>
#include <exception>
#include <functional>
#include <queue>
#include <vector>

#include "planner/status.h"

namespace magi {
namespace {

// Sorted values of which some are taken away; finds the last one that is left at or before a place.
class Left {
 public:
  explicit Left(size_t size) : before_(size + 1) {
    for (size_t i = 0; i <= size; ++i) before_[i] = i;
  }

  // One more than the place of the last value that is left among the first `count`; 0 for none.
  size_t last_of(size_t count) {
    size_t end = count;
    while (before_[end] != end) end = before_[end];
    while (before_[count] != end) {
      const size_t next = before_[count];
      before_[count] = end;
      count = next;
    }
    return end;
  }

  void take(size_t end) { before_[end] = end - 1; }

 private:
  std::vector<size_t> before_;  // itself, or a place nearer to what is left
};

void starts_of(const double* times, int64_t num_work_tiles, int32_t num_ctas, double* starts) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int32_t i = 0; i < num_ctas; ++i) free_at.push(0.0);
  for (int64_t i = 0; i < num_work_tiles; ++i) {
    const double start = free_at.top();
    starts[i] = start;
    free_at.pop();
    free_at.push(start + times[i]);
  }
}

// Returns how many tiles are in groups.
int64_t group_tiles(const int64_t* blocks, int64_t num_tiles, int64_t period, int64_t* tiles,
                    int64_t* groups) {
  std::vector<int64_t> order;
  for (int64_t t = 0; t < num_tiles; ++t)
    if (blocks[t] > 0) order.push_back(t);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return blocks[a] < blocks[b]; });
  Left left(order.size());
  int64_t taken = 0;
  for (int64_t group = 0;; ++group) {
    size_t end = left.last_of(order.size());
    int64_t room = period;
    if (end == 0) return taken;
    while (end > 0) {
      const int64_t tile = order[end - 1];
      left.take(end);
      tiles[taken] = tile;
      groups[taken++] = group;
      room -= blocks[tile];
      const auto fits = std::upper_bound(order.begin(), order.end(), room,
                                         [&](int64_t most, int64_t t) { return most < blocks[t]; });
      end = left.last_of(size_t(fits - order.begin()));
    }
  }
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_simulate_starts(const double* times, int64_t num_work_tiles, int32_t num_ctas,
                                 double* starts) {
  if (num_work_tiles < 0 || num_ctas < 1 ||
      (num_work_tiles > 0 && (times == nullptr || starts == nullptr)))
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "num_work_tiles is %lld and num_ctas %d; give that many times and starts, and a CTA "
        "or more.",
        (long long)num_work_tiles, num_ctas);
  try {
    magi::starts_of(times, num_work_tiles, num_ctas, starts);
    return MAGI_OK;
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory to simulate %lld work tiles: %s.",
                      (long long)num_work_tiles, error.what());
  }
}

magi_status magi_group_tiles(const int64_t* blocks, int64_t num_tiles, int64_t period,
                             int64_t* tiles, int64_t* groups, int64_t* num_grouped) {
  const bool has_null = blocks == nullptr || tiles == nullptr || groups == nullptr;
  if (num_tiles < 0 || num_grouped == nullptr || (num_tiles > 0 && has_null))
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "num_tiles is %lld; give that many blocks, tiles and groups, and a place for "
                      "their number.",
                      (long long)num_tiles);
  try {
    *num_grouped = magi::group_tiles(blocks, num_tiles, period, tiles, groups);
    return MAGI_OK;
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory to group %lld tiles: %s.",
                      (long long)num_tiles, error.what());
  }
}

}  // extern "C"
