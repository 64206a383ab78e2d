// SPDX-License-Identifier: Apache-2.0
// The kernel before the main one of the backward, over the rows of queries. It computes delta =
// sum(out * dout) and the offsets of the exponents. With atomic dq it clears dq_accum. In
// deterministic mode it assigns the semaphore targets, and where the first writer stores it counts
// contributions, unless an earlier call of the plan has. With a work list
// bwd/rows/preprocess_work_list.cuh takes its place.
#pragma once

#include "device/mbarrier.cuh"
#include "ffa/common/row_delta.cuh"
#include "device/tma.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/semaphore_targets.cuh"

namespace magi {

// What the main kernel reads of a row of a block, the `number`-th of all heads; and delta for the
// caller. `at` is where its lse lies.
template <int kBlockM>
__device__ __forceinline__ void write_row(const BwdRowParams& p, int64_t number, int row,
                                          int64_t at, bool exists, float delta, float lse) {
  const bool is_seen = exists && lse != -INFINITY;  // a row that sees nothing may hold anything
  delta = is_seen ? delta : 0.f;
  p.stats[number * stat_floats(kBlockM) + row] =
      is_seen ? lse * kLog2e - p.dropout_log2_scale : INFINITY;
  p.stats[number * stat_floats(kBlockM) + kBlockM + row] = delta * p.dropout_inverse_scale;
  if (exists && p.out != nullptr && p.delta != nullptr) p.delta[at] = delta;
}

// A whole CTA: the visits of a block, when it is known which order fits the plan.
template <int kThreads, int kBlockM>
__device__ __forceinline__ void count_contributions(const BwdRowParams& p, int block) {
  wait_for_kernel_before();
  if (p.first_writer)
    sum_contributions<kThreads, kBlockM>(p, block);
  else
    for (int table = 0; table < (p.order[0] & kLaterTargets ? 2 : 1); ++table)
      assign_semaphore_targets<kThreads, kBlockM>(p, block, table);
}

// What is made of the visits to blocks, see bwd/schedule/semaphore_targets.cuh: nothing; it is made
// by this call; or there from an earlier one.
enum class Contributions { kNotCounted, kCounted, kKnown };

// One thread, of a block: its semaphore targets, which the main kernel reads next.
__device__ __forceinline__ void fetch_semaphore_targets(const BwdRowParams& p, int block) {
  const int64_t bytes = 4ll * p.target_tables * p.num_tiles * p.work_tiles_per_tile,
                first = block * bytes / 16 * 16, end = ((block + 1) * bytes + 15) / 16 * 16;
  prefetch_bytes(reinterpret_cast<const uint8_t*>(p.semaphore_targets) + first,
                 static_cast<uint32_t>(end - first));
}

// One CTA per head and block of queries. If visits to blocks are counted, ahead of those one per
// block that does it, and assigns the semaphore targets: it waits for the simulation of the
// hand-out, while the others are at the rows. That takes more registers.
template <typename T, int kBlockM, Contributions kContributions>
__global__ void __launch_bounds__(kRowThreads, kContributions == Contributions::kCounted ? 5 : 6)
    bwd_preprocess(const BwdRowParams p) {
  const int block = blockIdx.x,
            head = blockIdx.y - (kContributions == Contributions::kCounted ? 1 : 0);
  start_next_kernel();
  if constexpr (kContributions == Contributions::kKnown)
    if (head == 0 && threadIdx.x == 0 && !p.first_writer) fetch_semaphore_targets(p, block);
  if constexpr (kContributions == Contributions::kCounted)
    if (head < 0) {
      if (bwd_plan_fits(p.plan, p.total_q, p.total_k))
        count_contributions<kRowThreads, kBlockM>(p, block);
      return;
    }
  const int64_t number = static_cast<int64_t>(head) * p.num_m_blocks + block;
  if (number == 0)
    for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads) p.workspace[i] = 0;
  if (kContributions != Contributions::kNotCounted && threadIdx.x == 0) p.dq_semaphore[number] = 0;
  float4* sum =
      reinterpret_cast<float4*>(p.dq_accum + number * p.dim_blocks * dq_block_floats(kBlockM));
  if (kContributions == Contributions::kNotCounted)
    for (int i = threadIdx.x; i < p.dim_blocks * dq_block_floats(kBlockM) / 4; i += kRowThreads)
      sum[i] = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int row = threadIdx.x / 8; row < kBlockM; row += kRowThreads / 8) {
    const int token = block * kBlockM + row, lane = threadIdx.x % 8;
    const int64_t at = static_cast<int64_t>(token) * p.heads_q + head;
    const bool exists = token < p.total_q;
    float delta = 0.f;
    if (p.out != nullptr)
      delta = row_delta<T>(p, exists ? token : 0, head, lane);
    else if (exists)
      delta = p.delta[at];
    const float lse = exists ? p.lse[at] : -INFINITY;
    if (lane == 0) write_row<kBlockM>(p, number, row, at, exists, delta, lse);
  }
}

}  // namespace magi
