// SPDX-License-Identifier: Apache-2.0
#include "planner/schedule/simulate.h"

#include <functional>
#include <queue>

namespace magi::schedule {
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

}  // namespace

std::vector<double> starts_of(const std::vector<double>& times, int num_ctas) {
  std::vector<double> starts;
  starts.reserve(times.size());
  std::vector<double> idle(static_cast<size_t>(num_ctas), 0.0);
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at({}, std::move(idle));
  for (double time : times) {
    starts.push_back(free_at.top());
    free_at.pop();
    free_at.push(starts.back() + time);
  }
  return starts;
}

TileGroups group_tiles(const std::vector<int64_t>& blocks, int64_t period) {
  std::vector<int64_t> order;
  for (size_t t = 0; t < blocks.size(); ++t)
    if (blocks[t] > 0) order.push_back(int64_t(t));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return blocks[size_t(a)] < blocks[size_t(b)]; });
  Left left(order.size());
  TileGroups made;
  for (int64_t group = 0;; ++group) {
    size_t end = left.last_of(order.size());
    int64_t room = period;
    if (end == 0) return made;
    while (end > 0) {
      const int64_t tile = order[end - 1];
      left.take(end);
      made.tiles.push_back(tile);
      made.groups.push_back(group);
      room -= blocks[size_t(tile)];
      const auto fits =
          std::upper_bound(order.begin(), order.end(), room,
                           [&](int64_t most, int64_t t) { return most < blocks[size_t(t)]; });
      end = left.last_of(size_t(fits - order.begin()));
    }
  }
}

}  // namespace magi::schedule
