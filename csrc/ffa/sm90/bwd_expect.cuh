// SPDX-License-Identifier: Apache-2.0
// The kernel before those of the backward where dq is summed in order (bwd_turns.cuh): it tells which order fits the plan, and
// simulates how units are handed out.
#pragma once

#include "../common/barrier.cuh"
#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_starts.cuh"

namespace magi {

// Whether units that all walk one way begin some blocks apart. Bands are apart as they are. Of several sections, or several heads of a unit,
// it lost where it was timed: what units walk is all over Q, dO and dq then, of which L2 has to keep more.
__device__ __forceinline__ bool begin_apart(const BwdRowParams& p, int flags, bool is_banded) {
  const int64_t bytes = 8ll * 64 * p.dim_blocks * p.heads_q * p.total_q;  // of Q, dO and dq, of one head 8 for each value
  return !is_banded && flags & kTimed && p.heads_per_part == 1 && p.heads_per_section == p.heads_kv && bytes <= kMostApart;
}

// The flags of a plan with these layers, most of which `is_banded`.
__device__ __forceinline__ int flags_of(const BwdRowParams& p, bool is_banded, bool visits_twice) {
  const bool by_head = is_banded && (p.first_stores || p.heads_per_part > 1);  // of one head blocks have an expected time
  if (visits_twice) return by_head ? kByHead : 0;
  const int flags = (by_head ? kByHead : 0) | (!by_head && p.num_tiles <= kMaxTimed ? kTimed : kInWaves);
  // Of plans in order only those have units whose tiles are ordered by document.
  const bool is_one_way = !p.first_stores && !by_head && p.heads_per_part <= kFewHeads && p.wave >= kManyRanks * p.heads_per_part;
  if (has_units(p.plan) || is_one_way) return flags | kAllBackwards | (is_one_way && begin_apart(p, flags, is_banded) ? kApart : 0);
  return flags | (!p.first_stores && !by_head && p.turn_tables == 2 ? kLaterTurns : 0);
}

// How units of the first section are handed out, and of the second behind it. Where there are several, each has more units than there are
// places.
__device__ __forceinline__ HandOut hand_out_of(const BwdRowParams& p, int flags) {
  // What waiting for those before it takes a unit of the first, in halves of a step: twice what an addition takes, as to expect it late costs
  // less than early. And to begin and end a unit takes two steps and a half.
  const int late_halves = p.dim_blocks == 1 ? 5 : p.dim_blocks == 2 ? 3 : 2;
  const bool is_one_way = flags & (kByHead | kAllBackwards);
  const int late = is_one_way ? 0 : kTicks * late_halves / (2 * p.heads_per_part);
  const int ends_after = is_one_way && !(flags & kApart) ? 0 : 5 * kTicks / (2 * p.heads_per_part);
  return {p.num_tiles, p.units_per_tile, p.places, late, ends_after, flags & kByHead ? p.heads_per_part : 1, (flags & kLaterTurns) != 0};
}

// One CTA of kThreads: the flags of the plan, and when units are expected to start.
template <int kThreads, int kQueries>
__global__ void __launch_bounds__(kThreads) bwd_expect(const BwdRowParams p) {
  __shared__ int bands, visits_twice;
  start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  int32_t* costs = p.order + 1;
  if (threadIdx.x == 0) bands = visits_twice = 0;
  __syncthreads();
  for (int rank = threadIdx.x; rank < p.num_tiles; rank += kThreads) {
    const int2 layers = layers_of_tile(p.plan, order[rank]);
    int cost = 0, votes = 0;
    bool twice = layers.y > 8;  // or it would take long to tell
    for (int i = 0; i < layers.y; ++i) {
      const int2 blocks = layer_blocks<kQueries>(p.plan, layers.x + i);
      cost += blocks.y - blocks.x;
      votes += is_band(*reinterpret_cast<const int4*>(layer_record(p.plan, layers.x + i) + 8)) ? 1 : -1;
      for (int j = 0; j < i && !twice; ++j) {
        const int2 other = layer_blocks<kQueries>(p.plan, layers.x + j);
        twice = blocks.x < other.y && other.x < blocks.y;
      }
    }
    costs[rank] = cost;
    atomicAdd(&bands, votes);
    if (twice) visits_twice = 1;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int flags = flags_of(p, bands > 0, visits_twice);
  if (threadIdx.x == 0) p.order[0] = flags;
  expect_starts(hand_out_of(p, flags), costs, costs + p.num_tiles);
}

}  // namespace magi
