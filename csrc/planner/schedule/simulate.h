// SPDX-License-Identifier: Apache-2.0
// The schedule simulated on the host: when work tiles start, and which tiles follow one another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace magi::schedule {

// CTAs that begin late, and when.
struct Late {
  int ctas = 0;
  double time = 0;
};

// When work tiles start that take so long, if the CTA that is free first takes the next one.
std::vector<double> starts_of(const std::vector<double>& times, int num_ctas, Late late = {});

// When the last of them ends; 0 if there are none.
inline double end_of(const std::vector<double>& times, int num_ctas, Late late = {}) {
  const std::vector<double> starts = starts_of(times, num_ctas, late);
  double end = 0;
  for (size_t i = 0; i < times.size(); ++i) end = std::max(end, starts[i] + times[i]);
  return end;
}

// Groups of tiles that follow one another, by the blocks that they visit: the longest that is left,
// and behind it the longest that still fit into what is left of `period`. Each tile that visits
// something is in one.
std::vector<std::vector<int64_t>> group_tiles(const std::vector<int64_t>& blocks, int64_t period);

}  // namespace magi::schedule
