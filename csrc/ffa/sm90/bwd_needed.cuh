// SPDX-License-Identifier: Apache-2.0
// The order in which blocks of queries are needed by the units of a list, for the kernel that prepares their rows
// (bwd_prepare_listed.cuh).
#pragma once

#include <climits>

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_split.cuh"

namespace magi {

constexpr int kAtOnce = 1;  // blocks of a unit whose rows are prepared before the main kernel begins

// When each block is first needed, in steps from the start, by the units that are taken up first.
template <int kQueries>
__device__ inline void find_needed(const BwdRowParams& p, int units, int32_t* needed) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < p.query_blocks; i += kRowThreads) needed[i] = INT_MAX;
  __syncthreads();
  for (int i = warp; i < min(units, p.places); i += kRowThreads / 32) {
    const int4 unit = p.units[i];
    const int2 layers = layers_of_tile(p.plan, unit.x);
    const bool is_part = split_slot(unit.z) > 0 && !is_cut(unit.z);
    int steps = 0;
    for (int layer = layers.x; layer < layers.x + layers.y; ++layer) {
      int2 blocks = layer_blocks<kQueries>(p.plan, layer);
      if (is_cut(unit.z)) (unit.z & kBehindCut ? blocks.x : blocks.y) = unit.z & (kBehindCut - 1);
      const int backwards = blocks_backwards(blocks, Way(unit.z >> kWayBit & 3));
      for (int block = blocks.x + lane; block < blocks.y; block += 32) {
        const int before = block >= blocks.y - backwards ? blocks.y - 1 - block : backwards + block - blocks.x;
        atomicMin(needed + block, is_part ? (steps + before) / kSplitParts : steps + before);
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
  for (int i = threadIdx.x; i < p.query_blocks; i += kRowThreads) atomicAdd(first + class_of(i), 1);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0, sum = 0; i < kRowThreads; ++i) {
      if (i == kAtOnce) p.list[kAtOnceWord] = sum;
      const int count = first[i];
      first[i] = sum;
      sum += count;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < p.query_blocks; i += kRowThreads) p.first_blocks[atomicAdd(first + class_of(i), 1)] = i;
}

}  // namespace magi
