// SPDX-License-Identifier: Apache-2.0
// Units whose query heads are shared out, so that all multiprocessors end together. Each part leaves its dk and dv in the
// workspace, and a kernel adds them in the order of the parts. Two cases:
//
// Where there are about two units for each multiprocessor, documents of different lengths leave some idle at the end. There the
// kernel before the main one lists the units anew: the longest first by the number of steps, which the cost in the plan does
// not tell, and, where that should end earlier, with the shorter half of the tiles split, to fill the gaps.
//
// Where there are more, the units of the last round are split if they are too few to fill it. Under a full mask, where all are
// equal, that round would otherwise take as long as the others; where the heaviest come first, parts of light ones cost little.
#pragma once

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"

namespace magi {

// Blocks of queries that a tile visits. Of many layers the planner's count will do, in which a block has twice as many queries.
__device__ inline int blocks_of_tile(const int32_t* plan, int tile) {
  constexpr int kCounted = 16;
  const int2 layers = layers_of_tile(plan, tile);
  if (layers.y > kCounted) {
    const int tiles_at = reinterpret_cast<const magi_tile_plan_header*>(plan)->words_tiles;
    return 2 * plan[tiles_at + 8 * tile + offsetof(magi_tile_desc, num_blocks) / 4];
  }
  int count = 0;
  for (int i = 0; i < layers.y; ++i) {
    const int2 blocks = layer_blocks<kQueryBlock>(plan, layers.x + i);
    count += blocks.y - blocks.x;
  }
  return count;
}

// One CTA of kRowThreads: the tiles by falling number of blocks, ties as in the plan.
__device__ inline void sort_tiles(const BwdRowParams& p, int2 (&sorted)[kMaxListed]) {
  __shared__ int blocks[kMaxListed];
  const int32_t* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads) blocks[i] = blocks_of_tile(p.plan, order[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads) {
    const int mine = blocks[i];
    int before = 0;
    for (int j = 0; j < p.num_tiles; ++j) before += blocks[j] > mine || (blocks[j] == mine && j < i);
    sorted[before] = make_int2(order[i], mine);
  }
  __syncthreads();
}

// Rows of units in the order in which they are taken up: tile, kv head, fourth word, time. Tiles from number `from` on are
// split; they come last, a part of all of them before the next part, so that what runs together reads the same heads. Returns
// the number of units.
__device__ inline int list_units(const BwdRowParams& p, int from, const int2 (&sorted)[kMaxListed]) {
  const int heads = p.heads_kv, slots = p.num_tiles - from, units = (from + slots * kSplitParts) * heads;
  for (int unit = threadIdx.x; unit < units; unit += kRowThreads) {
    const int in_split = unit - from * heads, slot = in_split < 0 ? 0 : in_split / heads % slots;
    const int2 tile = sorted[in_split < 0 ? unit / heads : from + slot];
    int word = static_cast<int>(unit < p.places ? Way::kEarly : Way::kForwards) << kWayBit;
    if (in_split >= 0) word |= in_split / (slots * heads) | (in_split % (slots * heads) + 1) << kSlotBit;
    // To start and end a unit takes a third of the time of a block for all heads. Bounded, so that sums fit.
    const int time = (in_split < 0 ? 3 * kSplitParts : 3) * min(tile.y, 1 << 19) + 4;
    p.units[unit] = make_int4(tile.x, unit % heads, word, time);
  }
  return units;
}

// What one warp finds out about units of which each goes to the multiprocessor that is free first.
struct UnitTimes {
  unsigned end, sum, longest;
};

// Lane l keeps when multiprocessors l, l + 32, ... will be free. There are as many units as those, or more.
__device__ inline UnitTimes time_units(const int4* rows, int units, int places, int lane) {
  constexpr int kPlaces = kMaxWave / 32;
  unsigned ends[kPlaces], sum = 0;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) ends[i] = lane + 32 * i < places ? rows[lane + 32 * i].w : ~0u;
  unsigned last = rows[0].w;
  for (int i = lane; i < units; i += 32) sum += rows[i].w;
  for (int base = places; base < units; base += 32) {
    const unsigned costs = base + lane < units ? rows[base + lane].w : 0;
    const int left = min(32, units - base);
    for (int j = 0; j < left; ++j) {
      unsigned mine = ~0u;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) mine = min(mine, ends[i]);
      const unsigned first = __reduce_min_sync(0xffffffff, mine), end = first + __shfl_sync(0xffffffff, costs, j);
      bool taken = lane != __ffs(__ballot_sync(0xffffffff, mine == first)) - 1;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        if (taken || ends[i] != first) continue;
        ends[i] = end;
        taken = true;
      }
      last = max(last, end);
    }
  }
  return {last, __reduce_add_sync(0xffffffff, sum), static_cast<unsigned>(rows[0].w)};
}

// One CTA of kRowThreads. Lists the units with whole tiles or, where that is likely to end earlier, with split ones: those
// end about 8% after all multiprocessors would if they shared the work evenly, and not before the longest tile. Parts cost
// traffic, so 6% are asked for.
__device__ inline void choose_units(const BwdRowParams& p) {
  __shared__ int2 sorted[kMaxListed];
  __shared__ int splits;
  sort_tiles(p, sorted);
  int units = list_units(p, p.num_tiles, sorted);
  __syncthreads();
  if (threadIdx.x < 32) {
    const UnitTimes times = time_units(p.units, units, min(p.processors, units), threadIdx.x);
    const float even = 1.08f * static_cast<float>(times.sum) / static_cast<float>(p.processors);
    if (threadIdx.x == 0) splits = times.end > 1.06f * max(even, static_cast<float>(times.longest));
  }
  __syncthreads();
  if (splits) units = list_units(p, p.split_from, sorted);
  if (threadIdx.x > 0) return;
  p.workspace[kSplitWord] = splits;
  p.workspace[kUnitsWord] = units;
}

// From the fourth word of a unit: in which slot a split one leaves its dk and dv, counted from one; zero for a whole one.
__device__ __forceinline__ int split_slot(int word) { return word >> kSlotBit; }

// Query heads of a unit.
template <typename C>
__device__ __forceinline__ int heads_of_unit(const BwdKernelParams& p, int word) {
  return C::kSplit && split_slot(word) > 0 ? p.split_heads : p.heads_per_part;
}

}  // namespace magi
