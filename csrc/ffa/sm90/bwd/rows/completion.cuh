// SPDX-License-Identifier: Apache-2.0
// Lets the last kernel of the backward begin before the main one has ended, where work tiles are
// listed (bwd/schedule/work_list.cuh). Documents of different lengths leave multiprocessors idle at
// the end, and then most blocks of dq are complete.
//
// The list says of how many work tiles each tile consists, and work tiles count off. The first CTA
// of the last kernel finds out which tiles add to a block of dq and what is complete by then, and
// puts the rest into the order in which it was scheduled. CTAs take places in that order one after
// the other, and wait for what is there. It can: none of them starts before all CTAs of the main
// kernel have their places, and those wait for nobody but the kernels before, which have theirs.
#pragma once

#include "ffa/common/mbarrier.cuh"
#include "ffa/common/atomics.cuh"
#include "ffa/common/shared.cuh"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"

namespace magi {

// What the last kernel takes up at a time, for a part of the query heads of a kv head: a block of
// dq, or a share of a partial. Blocks are counted in 16 bits, and kv heads of what is listed in 9.
class Entry {
 public:
  __device__ __forceinline__ explicit Entry(int word) : word_(word) {}
  // The `number`-th of all: block by block, head by head, part by part; behind them partial by
  // partial.
  static __device__ __forceinline__ int word_of(const BwdRowParams& p, int number) {
    const int at = number / kListedHeadSplits, part = number % kListedHeadSplits,
              slot = at - p.num_m_blocks * p.heads_kv;
    return slot >= 0 ? kSlot | slot << 2 | part
                     : at / p.heads_kv << 11 | at % p.heads_kv << 2 | part;
  }
  __device__ __forceinline__ bool is_slot() const { return word_ & kSlot; }
  __device__ __forceinline__ int in_tile() const {
    return word_ & 0x7ff;
  }  // kv head and part, as one number
  __device__ __forceinline__ int part() const { return word_ & 3; }
  __device__ __forceinline__ int block() const { return word_ >> 11; }
  __device__ __forceinline__ int slot() const { return (word_ & ~kSlot) >> 2; }

 private:
  static constexpr int kSlot = 1 << 30;
  static_assert(kListedHeadSplits == 4 && kMaxWorkList <= 0x200);
  int word_;
};

// Where a work tile is counted off: its tile and kv head, and a bit for each part that it counts
// for.
__device__ __forceinline__ int splits_of_work_tile(const BwdKernelParams& p, int tile, int head,
                                                   int word) {
  constexpr int kAll = (1 << kListedHeadSplits) - 1;
  return (tile * p.heads_kv + head) << kListedHeadSplits |
         (partial_idx(word) > 0 && !is_cut(word) ? 1 << (word & 0xffff) : kAll);
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
// query heads of one kv head.
__device__ __forceinline__ bool is_block_complete(const BwdRowParams& p, int block, int in_tile) {
  bool all = true;
#pragma unroll 1
  for (int tile = threadIdx.x; tile < p.num_tiles; tile += kRowThreads) {
    const int word = __ldcg(p.completion.tiles + block * p.completion.tile_words + tile / 32);
    if (word >> tile % 32 & 1) all &= is_complete(p, tile, in_tile);
  }
  return all;
}

// The tiles that add to each block, and the last work tile in the list of those that are not
// complete; by one CTA. Which are complete only helps to guess. Nobody has a place before this is
// through, so here, once for all, it waits until all rows are prepared: those of blocks that no
// tile adds to need not be by now.
template <int kBlockM>
__device__ inline void look_for_incomplete(const BwdRowParams& p, int work_tiles) {
  __shared__ int
      last[kListedHeadSplits * kMaxWorkList];  // work tile, of each part of a tile and kv head
  const BwdCompletion& c = p.completion;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            per_tile = kListedHeadSplits * p.heads_kv;
  if (threadIdx.x == 0)
    while (load_acquire(p.workspace + kPreparedWord) < p.prepare_groups) {
    }
  for (int i = threadIdx.x; i < per_tile * p.num_tiles; i += kRowThreads) last[i] = 0;
  for (int i = threadIdx.x; i < p.num_m_blocks * c.tile_words; i += kRowThreads) c.tiles[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < work_tiles; i += kRowThreads) {
    const int4 work_tile = __ldcg(p.work_tiles + i);
    const bool is_part = partial_idx(work_tile.z) > 0 && !is_cut(work_tile.z);
    for (int part = is_part ? work_tile.z & 0xffff : 0;
         part < (is_part ? (work_tile.z & 0xffff) + 1 : kListedHeadSplits); ++part) {
      const int at = (work_tile.x * p.heads_kv + work_tile.y) * kListedHeadSplits + part;
      if (__ldcg(c.left + at) > 0) atomicMax(last + at, i);
    }
  }
  for (int tile = warp; tile < p.num_tiles; tile += kRowThreads / 32) {
    const int2 segments = segments_of_tile(p.plan, tile);
    for (int segment = segments.x; segment < segments.x + segments.y; ++segment) {
      const int2 blocks = segment_blocks<kBlockM>(p.plan, segment);
      for (int block = blocks.x + lane; block < blocks.y; block += 32)
        atomicOr(c.tiles + block * c.tile_words + tile / 32, 1 << tile % 32);
    }
  }
  __syncthreads();
  for (int block = warp; block < p.num_m_blocks; block += kRowThreads / 32)
    for (int i = lane; i < per_tile; i += 32) {
      int expected = 0;
      for (int word = 0; word < c.tile_words; ++word)
        for (uint32_t left = __ldcg(c.tiles + block * c.tile_words + word); left != 0;
             left &= left - 1)
          expected = max(expected, last[(32 * word + __ffs(left) - 1) * per_tile + i]);
      c.expected[block * per_tile + i] = expected;
    }
  for (int i = threadIdx.x; i < kListedHeadSplits * p.workspace[kSplitWord]; i += kRowThreads) {
    const int4 slot = __ldcg(p.work_tiles + work_tiles + i / kListedHeadSplits);
    const int* parts = last + (slot.x * p.heads_kv + slot.y) * kListedHeadSplits;
    c.expected[per_tile * p.num_m_blocks + i] =
        max(max(parts[0], parts[1]), max(parts[2], parts[3]));
  }
  __syncthreads();
}

// The order, in steps of a 256th of the list.
__device__ inline void order_entries(const BwdRowParams& p, int work_tiles) {
  constexpr int kSteps = kRowThreads;
  __shared__ int first[kSteps], sums[kSteps / 32];
  const BwdCompletion& c = p.completion;
  const int entries = kListedHeadSplits * (p.num_m_blocks * p.heads_kv + p.workspace[kSplitWord]),
            lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto step_of = [&](int entry) {
    return __ldcg(c.expected + entry) * kSteps / max(work_tiles, 1);
  };
  first[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += kRowThreads) atomicAdd(first + step_of(i), 1);
  __syncthreads();
  const int mine = first[threadIdx.x];
  int sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += sums[i];
  first[threadIdx.x] = sum - mine;
  __syncthreads();
  for (int i = threadIdx.x; i < c.entries; i += kRowThreads)
    c.order[i < entries ? atomicAdd(first + step_of(i), 1) : i] =
        i < entries ? Entry::word_of(p, i) : -1;
}

// The first place, when the order is known.
template <int kBlockM>
__device__ __forceinline__ int first_place(const BwdRowParams& p) {
  __shared__ int place;
  if (threadIdx.x == 0) place = atomicAdd(p.workspace + kPlaceWord, 1);
  __syncthreads();
  if (place == 0) {
    const int work_tiles = p.workspace[kNumWorkTilesWord];
    look_for_incomplete<kBlockM>(p, work_tiles);
    order_entries(p, work_tiles);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.workspace + kOrderedWord, 1);
  } else if (threadIdx.x == 0) {
    while (load_acquire(p.workspace + kOrderedWord) == 0) {
    }
  }
  __syncthreads();
  return place;
}

}  // namespace magi
