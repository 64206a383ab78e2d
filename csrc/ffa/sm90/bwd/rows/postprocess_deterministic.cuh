// SPDX-License-Identifier: Apache-2.0
// The last kernel of a deterministic backward: it rounds each block of dq when all tiles have added
// to it, while the main kernel is still at work.
//
// None of its CTAs starts before all CTAs of the main kernel are resident, and these wait for
// nothing here. Nor do puts of other ranks, for whose keys they may wait: those were launched ahead
// of the main kernel of their rank. Blocks are taken up in the order in which they should be
// complete, those of the heads that come first before the others.
#pragma once

#include "device/atomics.cuh"
#include "ffa/sm90/bwd/rows/postprocess.cuh"
#include "ffa/sm90/bwd/rows/postprocess_items.cuh"

namespace magi {

constexpr int postprocess_deterministic_ctas(int queries) {
  return queries == kBlockM64 ? 4 : 3;
}  // of an SM

// By a whole CTA: the blocks whose sums are to be rounded, in the order in which they should be
// complete. If they are more than its threads, that is the order in which they were counted.
struct SortedBlocks {
  int blocks[kRowThreads];
  int keys[kRowThreads];

  // Returns how many there are.
  __device__ __forceinline__ int sort(const BwdRowParams& p) {
    const int mine = threadIdx.x, count = __ldcg(p.summed);
    if (count > kRowThreads) return count;
    const int block = mine < count ? __ldcg(p.summed + 1 + mine) : 0;
    if (mine < count) keys[mine] = __ldcg(p.contributions_of_block + block).y;
    __syncthreads();
    if (mine < count) {
      int before = 0;
      for (int i = 0; i < count; ++i)
        before += keys[i] < keys[mine] || (keys[i] == keys[mine] && i < mine);
      blocks[before] = block;
    }
    __syncthreads();
    return count;
  }
  __device__ __forceinline__ int at(const BwdRowParams& p, int count, int order_idx) const {
    return count > kRowThreads ? __ldcg(p.summed + 1 + order_idx) : blocks[order_idx];
  }
};

// An item: its block, head and columns, and how many contributions the block gets.
struct PostprocessJob {
  int block, head, d, contributions;  // block -1: nothing is left
};

// The `number`-th item of so many blocks. `counts`: there are semaphore targets.
__device__ __forceinline__ PostprocessJob postprocess_job(const BwdRowParams& p,
                                                          const SortedBlocks& sorted, int blocks,
                                                          int number, bool counts) {
  const PostprocessItem x = postprocess_item(p, blocks, number);
  if (x.order_idx < 0 || !counts) return {x.order_idx, x.head, x.d, 0};
  const int block = sorted.at(p, blocks, x.order_idx);
  return {block, x.head, x.d, __ldcg(p.contributions_of_block + block).x};
}

__device__ __forceinline__ bool is_complete(const BwdRowParams& p, const PostprocessJob& x) {
  if (x.contributions == 0) return true;
  return load_acquire(p.dq_semaphore + static_cast<int64_t>(x.head) * p.num_m_blocks + x.block) >=
         x.contributions;
}

// The warpgroups of a few CTAs take up items until there are no more. While one is on its way, the
// next is taken and it is looked up whether that is there; none is taken earlier, as whoever takes
// it may have to wait.
template <typename T, int kBlockM>
__global__ void __launch_bounds__(kRowThreads, postprocess_deterministic_ctas(kBlockM))
    bwd_postprocess_deterministic(const __grid_constant__ BwdRowParams p) {
  __shared__ __align__(128) uint8_t staged[2][kBlockM * 128];
  __shared__ SortedBlocks sorted;
  __shared__ PostprocessJob jobs[2][2];  // of each warpgroup, at hand and the next
  const bool fits = bwd_plan_fits(p.plan, p.total_q, p.total_k);
  int blocks = p.num_m_blocks;
  if (fits)
    blocks = sorted.sort(p);
  else
    wait_for_kernel_before();  // without a plan nobody counts, and all of dq is NaN
  const int group = uniform(threadIdx.x / 128), leads = threadIdx.x % 128 == 0;
  PostprocessJob next;
  bool is_there;
  auto look_ahead = [&](int number) {
    next = postprocess_job(p, sorted, blocks, number, fits);
    is_there = is_complete(p, next);
  };
  if (leads) look_ahead(2 * blockIdx.x + group);
  for (int slot = 0;; slot ^= 1) {
    if (leads) {
      for (; !is_there; is_there = is_complete(p, next)) __nanosleep(200);
      jobs[group][slot] = next;
    }
    named_barrier(1 + group, 128);
    // In uniform registers, or there are too few of the others.
    const int block = uniform(jobs[group][slot].block), head = uniform(jobs[group][slot].head),
              d = uniform(jobs[group][slot].d);
    if (block < 0) break;
    // The first to add stores, so where nobody did there is nothing.
    postprocess_columns<T, kBlockM>(
        p, staged[group], block, head, d, fits && jobs[group][slot].contributions > 0,
        fits ? p.grad_scale : __int_as_float(0x7fffffff), [&] {
          if (leads) look_ahead(2 * gridDim.x + atomicAdd(p.workspace + kPlaceWord, 1));
        });
  }
  // What comes after this kernel is behind the main one, too.
  if (blockIdx.x + 1 != gridDim.x) return;
  wait_for_kernel_before();
  rank_barrier(p.barrier);
}

}  // namespace magi
