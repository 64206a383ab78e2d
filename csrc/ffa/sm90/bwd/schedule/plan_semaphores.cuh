// SPDX-License-Identifier: Apache-2.0
// The first kernel of a backward that sums dq in semaphore order
// (bwd/schedule/semaphore_targets.cuh): it chooses the order that fits the plan, and simulates the
// schedule of the work tiles. It is not launched where the caller has kept what an earlier call of
// the plan made.
#pragma once

#include "device/mbarrier.cuh"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/simulate.cuh"

namespace magi {

// One CTA of kThreads: the flags of the plan, and when work tiles are expected to start.
template <int kThreads, int kBlockM>
__global__ void __launch_bounds__(kThreads) bwd_plan_semaphores(const BwdRowParams p) {
  __shared__ int bands, others, contributes_twice;
  start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  int32_t* costs = p.order + 1;
  if (threadIdx.x == 0) {
    bands = others = contributes_twice = 0;
    p.summed[0] = 0;
  }
  __syncthreads();
  for (int order_idx = threadIdx.x; order_idx < p.num_tiles; order_idx += kThreads) {
    const int2 segments = segments_of_tile(p.plan, order[order_idx]);
    int cost = 0, banded = 0;
    bool twice = segments.y > 8;  // or it would take long to tell
    for (int i = 0; i < segments.y; ++i) {
      const int2 blocks = segment_blocks<kBlockM>(p.plan, segments.x + i);
      cost += blocks.y - blocks.x;
      banded += is_band(*reinterpret_cast<const int4*>(segment_record(p.plan, segments.x + i) + 8));
      for (int j = 0; j < i && !twice; ++j) {
        const int2 other = segment_blocks<kBlockM>(p.plan, segments.x + j);
        twice = blocks.x < other.y && other.x < blocks.y;
      }
    }
    costs[order_idx] = cost;
    atomicAdd(&bands, banded);
    atomicAdd(&others, segments.y - banded);
    if (twice) contributes_twice = 1;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int flags = flags_of(p, bands, others, contributes_twice);
  if (threadIdx.x == 0) p.order[0] = flags;
  expect_starts(schedule_model_of(p, flags), costs, costs + p.num_tiles);
}

}  // namespace magi
