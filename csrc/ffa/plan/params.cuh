// SPDX-License-Identifier: Apache-2.0
// What both kernels of the device tile planner are given, and how they read a slice.
#pragma once

#include <cuda_runtime.h>

#include "ffa/common/host.h"

// Teams and pools of the shared header have device members only.
#pragma nv_diag_suppress 20011, 20012, 20014
#include "planner/tile_core.h"

namespace magi {
namespace tile {
inline namespace planner {  // named: into an unnamed one nvcc puts the path of the sources, and
                            // builds would differ

constexpr uint32_t kAll = 0xffffffffu;
constexpr int32_t kMaxRanges = 16384;  // key ranges merged at a time

struct PlanParams {
  const int2* q_ranges;
  const int2* k_ranges;
  const int32_t* types;  // or NULL
  int32_t num_slices, total_q, total_k, num_tiles;
  Shape shape;
  int32_t* plan;
  int32_t words_order, words_records;
  int32_t capacity;    // records
  int32_t max_ranges;  // key ranges that the finishing kernel's shared memory holds, a power of two

  __device__ magi_tile_plan_header* header() const {
    return reinterpret_cast<magi_tile_plan_header*>(plan);
  }
  __device__ magi_tile_desc* tiles() const {
    return reinterpret_cast<magi_tile_desc*>(plan + kHeaderWords);
  }
  __device__ int32_t* order() const { return plan + words_order; }
  __device__ int32_t* record(int64_t i) const {
    return plan + words_records + i * segment_words(shape.tile_tokens);
  }
  // Records taken so far. Lives in the last two words of the header, which the second kernel
  // clears.
  __device__ unsigned long long* taken() const {
    return reinterpret_cast<unsigned long long*>(&header()->words_first_order);
  }
};

// Where the parts of a plan of so many words lie, and what fits.
inline void set_layout(PlanParams& p, int32_t num_tiles, int64_t plan_words) {
  const int64_t records = records_at(num_tiles);
  const int64_t room = (plan_words < kInt32Max ? plan_words : kInt32Max) - records;
  p.num_tiles = num_tiles;
  p.words_order = static_cast<int32_t>(order_at(num_tiles));
  p.words_records = static_cast<int32_t>(records);
  p.capacity = static_cast<int32_t>(room / segment_words(p.shape.tile_tokens));
  p.max_ranges = 2;
  while (p.max_ranges < p.num_slices && p.max_ranges < kMaxRanges) p.max_ranges *= 2;
}

// Slice i, trimmed; false if it is malformed or allows nothing. Its queries are given, since
// callers look at them first.
__device__ inline bool load_slice(const PlanParams& p, int32_t i, int2 q, Slice& s) {
  const int2 k = p.k_ranges[i];
  s = Slice{q.x, q.y, k.x, k.y, p.types != nullptr ? p.types[i] : 0};
  if (s.q0 < 0 || s.q1 > p.total_q || s.k0 < 0 || s.k1 > p.total_k || s.type < 0 || s.type > 3)
    return false;
  return trim_slice(s);
}

}  // namespace planner
}  // namespace tile
}  // namespace magi
