// SPDX-License-Identifier: Apache-2.0
// The kernel before those of the backward where dq is summed in order (bwd_turns.cuh): it tells which order fits the plan, and
// simulates how units are handed out.
#pragma once

#include "../common/barrier.cuh"
#include "bwd_params.h"
#include "bwd_plan.cuh"

namespace magi {

// One CTA of kThreads: the flags of the plan, and when each unit of a section is expected to start, in blocks of one head.
template <int kThreads, int kQueries>
__global__ void __launch_bounds__(kThreads) bwd_expect(const BwdRowParams p) {
  __shared__ int bands, visits_twice;
  start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  int32_t *costs = p.order + 1, *starts = costs + p.num_tiles;
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
  const bool by_head = bands > 0, timed = !by_head && p.num_tiles <= kMaxTimed;
  const int lane = threadIdx.x;
  if (lane == 0) {
    // Of plans in order only those have units whose tiles are ordered by document.
    const int by_document = has_units(p.plan) ? kByDocument : 0;
    p.order[0] = (by_head ? kByHead : 0) | by_document | (visits_twice ? 0 : timed ? kTimed : kInWaves);
  }
  if (lane >= 32) return;
  // Lane l keeps the ends of what CTAs l, l + 32, ... are at; the next unit goes to the one that ends first.
  constexpr int kPlaces = kMaxWave / 32;
  const int units = p.num_tiles * p.units_per_tile;
  unsigned ends[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int unit = lane + 32 * i;
    ends[i] = unit < min(p.places, units) ? costs[unit / p.units_per_tile] : ~0u;
    if (unit < min(p.places, units)) starts[unit] = 0;
  }
  int rank = p.places / p.units_per_tile, kind = p.places % p.units_per_tile;
  unsigned cost = rank < p.num_tiles ? costs[rank] : 0, next_cost = rank + 1 < p.num_tiles ? costs[rank + 1] : 0;
  for (int unit = p.places; unit < units; ++unit, ++kind) {
    if (kind == p.units_per_tile) {
      kind = 0;
      cost = next_cost;
      ++rank;
      next_cost = rank + 1 < p.num_tiles ? costs[rank + 1] : 0;
    }
    unsigned mine = ~0u;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) mine = min(mine, ends[i]);
    const unsigned first = __reduce_min_sync(0xffffffff, mine);
    if (lane == 0) starts[unit] = first * (by_head ? p.heads_per_part : 1);
    bool taken = lane != __ffs(__ballot_sync(0xffffffff, mine == first)) - 1;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (taken || ends[i] != first) continue;
      ends[i] = first + cost;
      taken = true;
    }
  }
}

}  // namespace magi
