// SPDX-License-Identifier: Apache-2.0
// Lets the last kernel of the backward begin before the main one has ended, where there is a work
// list. Documents of different lengths leave SMs idle at the end, and then most blocks of dq are
// complete.
//
// The list says of how many work tiles each part of a tile consists, and each that ends counts it
// down. The list also has the order in which blocks and partials should be complete. CTAs of the
// last kernel take them up in that order, and wait for what is missing. That cannot deadlock: none
// of them starts before all CTAs of the main kernel are resident, and those wait only for the
// kernels before, which are resident, too.
#pragma once

#include "device/mbarrier.cuh"
#include "device/atomics.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"

namespace magi {

// Where a work tile is counted off: its tile and kv head, and a bit for each part that it counts
// for.
__device__ __forceinline__ int splits_of_work_tile(const BwdKernelParams& p, int tile, int head,
                                                   int word) {
  constexpr int kAll = (1 << kListedHeadSplits) - 1;
  return (tile * p.heads_kv + head) << kListedHeadSplits |
         (partial_idx(word) > 0 && !is_cut(word) ? 1 << split_of_work_tile(word) : kAll);
}

// One lane of the main kernel, when a work tile is through: all warps have arrived behind their
// last additions to dq and, if it is split, behind what they wrote of dk and dv.
__device__ __forceinline__ void tell_complete(const BwdKernelParams& p, uint32_t parts_at) {
  __threadfence();  // orders what other threads wrote, too: this one has waited for them
#pragma unroll 1
  for (int part = 0; part < kListedHeadSplits; ++part)
    if (lds_int(parts_at) >> part & 1)
      add_relaxed(
          p.completion.left + (lds_int(parts_at) >> kListedHeadSplits) * kListedHeadSplits + part,
          -1);
}

__device__ __forceinline__ bool is_complete(const BwdRowParams& p, int tile, int in_tile) {
  return load_acquire(p.completion.left + tile * p.heads_kv * kListedHeadSplits + in_tile) <= 0;
}

// This thread's share of whether all tiles that add to a block are complete, for a part of the
// query heads of one kv head. `tiles`: a bit for each of them.
__device__ __forceinline__ bool is_block_complete(const BwdRowParams& p, const int32_t* tiles,
                                                  int in_tile) {
  bool all = true;
#pragma unroll 1
  for (int tile = threadIdx.x; tile < p.num_tiles; tile += kRowThreads)
    if (__ldg(tiles + tile / 32) >> tile % 32 & 1) all &= is_complete(p, tile, in_tile);
  return all;
}

}  // namespace magi
