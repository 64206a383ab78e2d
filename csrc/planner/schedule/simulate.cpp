// SPDX-License-Identifier: Apache-2.0
#include "planner/schedule/simulate.h"

#include <functional>
#include <limits>
#include <queue>
#include <set>

namespace magi::schedule {

std::vector<double> starts_of(const std::vector<double>& times, int num_ctas, Late late) {
  std::vector<double> starts, idle(static_cast<size_t>(num_ctas), 0.0);
  std::fill_n(idle.rbegin(), late.ctas, late.time);
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at({}, std::move(idle));
  starts.reserve(times.size());
  for (double time : times) {
    starts.push_back(free_at.top());
    free_at.pop();
    free_at.push(starts.back() + time);
  }
  return starts;
}

std::vector<std::vector<int64_t>> group_tiles(const std::vector<int64_t>& blocks, int64_t period) {
  std::set<std::pair<int64_t, int64_t>> left;  // blocks and tile
  for (size_t t = 0; t < blocks.size(); ++t)
    if (blocks[t] > 0) left.insert({blocks[t], int64_t(t)});
  std::vector<std::vector<int64_t>> groups;
  while (!left.empty()) {
    groups.emplace_back();
    int64_t room = period;
    for (auto end = left.end(); end != left.begin();
         end = left.upper_bound({room, std::numeric_limits<int64_t>::max()})) {
      const auto longest = std::prev(end);
      groups.back().push_back(longest->second);
      room -= longest->first;
      left.erase(longest);
    }
  }
  return groups;
}

}  // namespace magi::schedule
