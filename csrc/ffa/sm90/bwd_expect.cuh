// SPDX-License-Identifier: Apache-2.0
// The kernel before those of the backward where dq is summed in order (bwd_turns.cuh): it tells which order fits the plan, and
// simulates how units are handed out. Not launched where an earlier call of the plan did so, and what it made was kept.
#pragma once

#include "../common/barrier.cuh"
#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_starts.cuh"

namespace magi {

// One CTA of kThreads: the flags of the plan, and when units are expected to start.
template <int kThreads, int kQueries>
__global__ void __launch_bounds__(kThreads) bwd_expect(const BwdRowParams p) {
  __shared__ int bands, others, visits_twice;
  start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  int32_t* costs = p.order + 1;
  if (threadIdx.x == 0) {
    bands = others = visits_twice = 0;
    p.summed[0] = 0;
  }
  __syncthreads();
  for (int rank = threadIdx.x; rank < p.num_tiles; rank += kThreads) {
    const int2 layers = layers_of_tile(p.plan, order[rank]);
    int cost = 0, banded = 0;
    bool twice = layers.y > 8;  // or it would take long to tell
    for (int i = 0; i < layers.y; ++i) {
      const int2 blocks = layer_blocks<kQueries>(p.plan, layers.x + i);
      cost += blocks.y - blocks.x;
      banded += is_band(*reinterpret_cast<const int4*>(layer_record(p.plan, layers.x + i) + 8));
      for (int j = 0; j < i && !twice; ++j) {
        const int2 other = layer_blocks<kQueries>(p.plan, layers.x + j);
        twice = blocks.x < other.y && other.x < blocks.y;
      }
    }
    costs[rank] = cost;
    atomicAdd(&bands, banded);
    atomicAdd(&others, layers.y - banded);
    if (twice) visits_twice = 1;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int flags = flags_of(p, bands, others, visits_twice);
  if (threadIdx.x == 0) p.order[0] = flags;
  expect_starts(hand_out_of(p, flags), costs, costs + p.num_tiles);
}

}  // namespace magi
