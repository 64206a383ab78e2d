// SPDX-License-Identifier: Apache-2.0
// The last kernel of the backward where dq is summed in order: it rounds each block when all have added to it, while others are still
// at work.
//
// None of its CTAs starts before all CTAs of the main kernel have their places, and these wait for nobody here; nor do other ranks,
// for whose keys they may wait: what sends those was launched ahead of the main kernel of its rank. Blocks are taken up in the
// order in which they should be complete, those of the heads that come first before the others.
#pragma once

#include "bwd_finish.cuh"

namespace magi {

// The block that is expected to be complete after so many others. Of many blocks the order is that of their numbers.
__device__ __forceinline__ int block_in_order(const BwdRowParams& p, int rank) {
  __shared__ int keys[kRowThreads], found;
  if (p.query_blocks > kRowThreads) return rank;
  const int mine = threadIdx.x;
  if (mine < p.query_blocks) keys[mine] = __ldcg(p.turns_of_block + mine).y;
  __syncthreads();
  if (mine < p.query_blocks) {
    int before = 0;
    for (int i = 0; i < p.query_blocks; ++i) before += keys[i] < keys[mine] || (keys[i] == keys[mine] && i < mine);
    if (before == rank) found = mine;
  }
  __syncthreads();
  return found;
}

// One CTA per head and block of queries.
template <typename T, int kQueries>
__global__ void __launch_bounds__(kRowThreads, 3) bwd_finish_turns(const __grid_constant__ BwdRowParams p) {
  const bool fits = bwd_plan_fits(p.plan, p.total_q, p.total_k);
  // What comes after this kernel is behind the main one, too; and without a plan nobody counts.
  if (!fits || blockIdx.x + 1 == gridDim.x) wait_for_kernel_before();
  const int per_section = p.heads_per_section * (p.heads_q / p.heads_kv);
  const int first = blockIdx.x / (per_section * p.query_blocks) * per_section;
  const int heads = min(per_section, p.heads_q - first), at = blockIdx.x - first * p.query_blocks;
  const int block = fits ? block_in_order(p, at / heads) : at / heads, head = first + at % heads;
  if (fits && threadIdx.x < p.passes) {
    const int32_t* flag = p.turn_flags + (static_cast<int64_t>(head) * p.query_blocks + block) * p.passes + threadIdx.x;
    const int turns = __ldcg(p.turns_of_block + block).x;
    while (load_acquire(flag) < turns) __nanosleep(200);
  }
  __syncthreads();
  // In uniform registers, or there are too few of the others.
  finish_block<T, kQueries>(p, uniform(block), uniform(head), fits ? p.grad_scale : __int_as_float(0x7fffffff), [] {});
}

}  // namespace magi
