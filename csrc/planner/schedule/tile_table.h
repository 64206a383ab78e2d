// SPDX-License-Identifier: Apache-2.0
// What the schedule of a backward is chosen by: how many blocks of queries each tile of a
// transposed plan visits, and where.
#pragma once

#include <numeric>
#include <vector>

#include "planner/schedule/heuristics_h100.h"
#include "planner/schedule/plan_reader.h"

namespace magi::schedule {

constexpr int kTile = 128;                              // keys
constexpr int kNarrow = 64, kWide = 80, kWidest = 128;  // queries of an m-block

template <typename T>
T sum_of(const std::vector<T>& values) {
  return std::accumulate(values.begin(), values.end(), T(0));
}

// By tile: the first block of 80 queries that it sees and how many, and whether these are in one
// segment. There are `blocks`.
class TileTable {
 public:
  explicit TileTable(const PlanReader& plan)
      : plan_(plan),
        blocks((int64_t(plan.num_queries()) + kWide - 1) / kWide),
        first(size_t(plan.num_tiles())),
        count(steps(kWide)),
        is_single(first.size()) {
    for (int tile = 0; tile < size(); ++tile) {
      const int segments = plan.num_segments(tile);
      first[size_t(tile)] = segments > 0 ? plan.blocks(tile, 0, kWide).first : 0;
      is_single[size_t(tile)] = segments == 1;
    }
  }

  int size() const { return plan_.num_tiles(); }
  const PlanReader& plan() const { return plan_; }

  // Blocks of so many queries that each tile visits, over all its segments.
  std::vector<int64_t> steps(int queries) const {
    std::vector<int64_t> made(size_t(plan_.num_tiles()));
    for (int tile = 0; tile < plan_.num_tiles(); ++tile)
      for (int i = 0; i < plan_.num_segments(tile); ++i)
        made[size_t(tile)] += plan_.blocks(tile, i, queries).count();
    return made;
  }

  // The share of m-blocks of so many queries that one segment of one tile visits, and no other.
  double single_share(int queries) const {
    const int64_t num = (int64_t(plan_.num_queries()) + queries - 1) / queries;
    std::vector<int> change(size_t(num) + 1);
    for (int tile = 0; tile < size(); ++tile)
      for (int i = 0; i < plan_.num_segments(tile); ++i) {
        const Blocks b = plan_.blocks(tile, i, queries);
        ++change[size_t(b.first)];
        --change[size_t(b.end)];
      }
    int64_t single = 0;
    for (int64_t block = 0, seen = 0; block < num; ++block)
      single += (seen += change[size_t(block)]) == 1;
    return num ? double(single) / double(num) : 0.0;
  }

  // Segments of a tile, on average.
  double mean_segments() const { return double(plan_.num_all_segments()) / std::max(size(), 1); }

  // Whether a tile sees all from its first block to the last of all.
  bool is_aligned(size_t tile) const {
    return is_single[tile] && first[tile] + count[tile] == blocks;
  }

 private:
  const PlanReader& plan_;

 public:
  const int64_t blocks;
  std::vector<int64_t> first, count;
  std::vector<char> is_single;
};

}  // namespace magi::schedule
