// SPDX-License-Identifier: Apache-2.0
// The order in which blocks of queries are needed by the work tiles of a list, for the kernel that
// prepares their rows (bwd/rows/preprocess_work_list.cuh).
#pragma once

#include <climits>

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"

namespace magi {

constexpr int kAtOnce =
    1;  // blocks of a work tile whose rows are prepared before the main kernel begins

// When each block is first needed, in steps from the start, by the work tiles that are taken up
// first.
template <int kBlockM>
__device__ inline void find_needed(const BwdRowParams& p, int work_tiles, int32_t* needed) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < p.num_m_blocks; i += kRowThreads) needed[i] = INT_MAX;
  __syncthreads();
  for (int i = warp; i < min(work_tiles, p.num_ctas); i += kRowThreads / 32) {
    const int4 work_tile = p.work_tiles[i];
    const int2 segments = segments_of_tile(p.plan, work_tile.x);
    const bool is_part = partial_idx(work_tile.z) > 0 && !is_cut(work_tile.z);
    int steps = 0;
    for (int segment = segments.x; segment < segments.x + segments.y; ++segment) {
      int2 blocks = segment_blocks<kBlockM>(p.plan, segment);
      if (is_cut(work_tile.z))
        (work_tile.z & kBehindCut ? blocks.x : blocks.y) = work_tile.z & (kBehindCut - 1);
      const int backwards = blocks_backwards(blocks, Traversal(work_tile.z >> kTraversalBit & 3));
      for (int block = blocks.x + lane; block < blocks.y; block += 32) {
        const int before =
            block >= blocks.y - backwards ? blocks.y - 1 - block : backwards + block - blocks.x;
        atomicMin(needed + block, is_part ? (steps + before) / kListedHeadSplits : steps + before);
      }
      steps += max(blocks.y - blocks.x, 0);
    }
  }
  __syncthreads();
}

// Blocks in the order in which they are needed, in kRowThreads classes.
__device__ inline void order_blocks(const BwdRowParams& p, const int32_t* needed) {
  __shared__ int first[kRowThreads];
  first[threadIdx.x] = 0;
  auto class_of = [&](int block) { return min(__ldcg(needed + block), kRowThreads - 1); };
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_m_blocks; i += kRowThreads) atomicAdd(first + class_of(i), 1);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0, sum = 0; i < kRowThreads; ++i) {
      if (i == kAtOnce) p.list[kAtOnceWord] = sum;
      const int count = first[i];
      first[i] = sum;
      sum += count;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_m_blocks; i += kRowThreads)
    p.first_blocks[atomicAdd(first + class_of(i), 1)] = i;
}

}  // namespace magi
