// SPDX-License-Identifier: Apache-2.0
// Walks a tile plan against the slices it was made from. Written from the definitions alone: it
// shares no code with the producers, so that one cannot hide the other's mistake.
//
// Every row is checked as a set of intervals: those of its segments against those of its slices.
// Costs and ranges follow from the rows' intervals. Nothing is per pair, so a plan of a million
// tokens takes a fraction of a second.
#ifndef MAGI_PLANNER_PLAN_WALKER_H
#define MAGI_PLANNER_PLAN_WALKER_H

#include <cstdint>
#include <cstring>
#include <vector>

#include "magi/abi.h"
#include "planner/status.h"

namespace magi {
namespace walk {

struct Interval {
  int64_t lo, hi;
  int64_t from;  // slice, or segment of the tile

  bool operator<(const Interval& other) const { return lo < other.lo; }
};

// What query row q of a slice may see; lo >= hi for nothing.
inline Interval row_interval(const int32_t* slice, int64_t id, int64_t q) {
  const int64_t q0 = slice[0], q1 = slice[1], k0 = slice[2], k1 = slice[3];
  const bool causal = slice[4] & 1, inverse = slice[4] & 2;
  Interval out{k0, k1, id};
  if (inverse) out.lo = k0 + (q - q0);
  if (causal) out.hi = k1 - (q1 - 1 - q);
  return out;
}

// Keeps the sentence for magi_last_error.
__attribute__((format(printf, 1, 2))) magi_status fault(const char* format, ...);

class Walker {
 public:
  Walker(const int32_t* slices, int64_t num_slices, const int32_t* plan, int64_t plan_words)
      : slices_(slices), num_slices_(num_slices), plan_(plan), plan_words_(plan_words) {}

  magi_status run() {
    for (auto step : {&Walker::check_header, &Walker::check_slices, &Walker::check_unseen,
                      &Walker::check_records, &Walker::check_order, &Walker::check_tiles,
                      &Walker::check_key_blocks}) {
      const magi_status status = (this->*step)();
      if (status != MAGI_OK) return status;
    }
    return MAGI_OK;
  }

 private:
  magi_status check_header();
  magi_status check_slices();
  magi_status check_unseen();
  magi_status check_records();
  magi_status check_order();
  magi_status check_tiles();
  magi_status check_tile(int64_t t);
  magi_status check_segment(int64_t t, int64_t segment);
  magi_status check_group(int64_t t, int64_t segment, int64_t g);
  magi_status check_row(int64_t t, int64_t q);
  magi_status compare_row(int64_t t, int64_t q);
  magi_status check_cost(int64_t t);
  magi_status check_key_blocks();

  // Copies, so that no field is read through a pointer of the wrong type.
  magi_tile_desc tile(int64_t t) const {
    magi_tile_desc out;
    memcpy(&out, plan_ + header_.words_tiles + t * 8, sizeof(out));
    return out;
  }
  const int32_t* record(int64_t index) const {
    return plan_ + header_.words_records + index * int64_t(header_.segment_words);
  }
  magi_tile_segment segment_of(int64_t t, int64_t segment) const {
    magi_tile_segment out;
    memcpy(&out, record(tile(t).segment_begin + segment), sizeof(out));
    return out;
  }
  const int32_t* pairs_of(int64_t t, int64_t segment) const {
    return record(tile(t).segment_begin + segment) + 32;
  }
  int64_t group_begin(int64_t g) const { return g * header_.tile_tokens / header_.num_groups; }

  const int32_t* slices_;
  int64_t num_slices_;
  const int32_t* plan_;
  int64_t plan_words_;
  magi_tile_plan_header header_{};
  std::vector<Interval> unseen_;   // gaps between seen keys, sorted
  std::vector<int64_t> by_start_;  // slice ids by first query
  std::vector<int64_t> active_;    // slices that hold the current query
  size_t next_ = 0;                // in by_start_
  std::vector<Interval> wanted_, found_;
};

}  // namespace walk
}  // namespace magi

#endif  // MAGI_PLANNER_PLAN_WALKER_H
