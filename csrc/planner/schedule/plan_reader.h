// SPDX-License-Identifier: Apache-2.0
// What the schedule of a backward reads out of a transposed tile plan in host memory: which blocks
// of queries each tile of keys visits.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "magi/abi.h"

namespace magi::schedule {

// Blocks of queries from `first` to before `end`.
struct Blocks {
  int first = 0, end = 0;
  int count() const { return end - first; }
};

class PlanReader {
 public:
  PlanReader(const int32_t* plan, int block_m)
      : plan_(plan),
        header_(*reinterpret_cast<const magi_tile_plan_header*>(plan)),
        block_m_(block_m) {}

  const int32_t* words() const { return plan_; }
  int num_tiles() const { return header_.num_tiles; }
  int num_queries() const { return header_.total_k; }
  int num_all_segments() const { return header_.num_segments; }
  int block_m() const { return block_m_; }
  int num_m_blocks() const { return (header_.total_k + block_m_ - 1) / block_m_; }
  const int32_t* order() const { return plan_ + header_.words_order; }
  // The order of the first L2 group of heads.
  const int32_t* first_order() const {
    return header_.words_first_order ? plan_ + header_.words_first_order : order();
  }
  const magi_tile_plan_header& header() const { return header_; }
  int num_key_blocks(int tile) const { return desc(tile).num_blocks; }

  int num_segments(int tile) const { return desc(tile).num_segments; }
  const magi_tile_segment& segment(int tile, int i) const {
    return *reinterpret_cast<const magi_tile_segment*>(record(tile, i));
  }
  // Blocks of so many queries that a segment visits. An outline of a plan has no more of one.
  Blocks blocks(int tile, int i, int queries) const {
    const int32_t* visits = record(tile, i);
    return {visits[0] / queries, visits[1] / queries + (visits[1] % queries != 0)};
  }
  Blocks blocks(int tile, int i) const { return blocks(tile, i, block_m_); }

  // Blocks of a segment that some key does not see whole.
  int num_masked(int tile, int i) const {
    const auto& group = segment(tile, i).group;
    const Blocks b = blocks(tile, i);
    const int first = (std::max(group[0].full_lo, group[1].full_lo) + block_m_ - 1) / block_m_,
              end = std::min(group[0].full_hi, group[1].full_hi) / block_m_;
    return b.count() - std::max(std::min(end, b.end) - std::max(first, b.first), 0);
  }

  static constexpr int kMaxCut = 1 << 15;  // a block in 15 bits of the word of a work tile

  // Where the queries of the first document of a tile end, if those of others follow: as a block,
  // or 0. For tiles of one segment.
  int cut(int tile) const {
    if (num_segments(tile) != 1) return 0;
    const int32_t* rows = record(tile, 0) + sizeof(magi_tile_segment) / 4;
    int end = INT_MAX;
    for (int row = 0; row < header_.tile_tokens; ++row)
      if (rows[2 * row] < rows[2 * row + 1]) end = std::min(end, rows[2 * row + 1]);
    const Blocks b = blocks(tile, 0);
    const int at = end / block_m_;
    return at > b.first && at < b.end && at < kMaxCut ? at : 0;
  }

 private:
  const magi_tile_desc& desc(int tile) const {
    return reinterpret_cast<const magi_tile_desc*>(plan_ + header_.words_tiles)[tile];
  }
  const int32_t* record(int tile, int i) const {
    return plan_ + header_.words_records +
           static_cast<int64_t>(desc(tile).segment_begin + i) * header_.segment_words;
  }

  const int32_t* plan_;
  const magi_tile_plan_header& header_;
  int block_m_;
};

}  // namespace magi::schedule
