// SPDX-License-Identifier: Apache-2.0
// Units whose query heads are shared out, so that all multiprocessors end together. Each part leaves its dk and dv in the
// workspace, and a kernel adds them in the order of the parts. Two cases:
//
// Where there are about two units for each multiprocessor, documents of different lengths leave some idle at the end. There the
// kernel before the main one lists the units anew: the longest first by how long they take, which the cost in the plan does
// not tell, and with those tiles split with which that should end soonest: the longest few, which would be at work when all
// others are through, or shorter ones, to fill the gaps.
//
// Where there are more, the units of the last round are split if they are too few to fill it. Under a full mask, where all are
// equal, that round would otherwise take as long as the others; where the heaviest come first, parts of light ones cost little.
#pragma once

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"

namespace magi {

// Times are in eighths of a step that needs no mask.
constexpr int kStepTime = 8, kMaskedStepTime = 9;
constexpr int kUnitTime = 21;  // to start and end a unit
constexpr int kSlotTime = 1;   // to add up the parts of a split one

// How long a tile takes for all heads of a unit, without start and end. Of many layers the planner's count will do, in which a
// block has twice as many queries. Bounded, so that sums fit.
__device__ inline int time_of_tile(const BwdRowParams& p, int tile) {
  constexpr int kCounted = 16;
  const int2 layers = layers_of_tile(p.plan, tile);
  int steps = 0, masked = 0;
  for (int i = 0; i < layers.y && layers.y <= kCounted; ++i) {
    const int2 blocks = layer_blocks<kQueryBlock>(p.plan, layers.x + i);
    const int4* groups = reinterpret_cast<const int4*>(layer_record(p.plan, layers.x + i) + 8);
    const int first = (max(groups[0].z, groups[1].z) + kQueryBlock - 1) / kQueryBlock, last = min(groups[0].w, groups[1].w) / kQueryBlock;
    const int plain = max(min(last, blocks.y) - max(first, blocks.x), 0);
    steps += blocks.y - blocks.x;
    masked += blocks.y - blocks.x - plain;
  }
  if (layers.y > kCounted) {
    const int tiles_at = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_tiles;
    steps = masked = 2 * p.plan[tiles_at + 8 * tile + offsetof(magi_tile_desc, num_blocks) / 4];
  }
  return min(kStepTime * steps + (kMaskedStepTime - kStepTime) * masked, 1 << 20) * p.heads_per_part;
}

// One CTA of kRowThreads: tiles and their times, the longest first, ties as in the plan.
__device__ inline void sort_tiles(const BwdRowParams& p, int2 (&sorted)[kMaxListed]) {
  __shared__ int times[kMaxListed];
  const int32_t* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads) times[i] = time_of_tile(p, order[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads) {
    const int mine = times[i];
    int before = 0;
    for (int j = 0; j < p.num_tiles; ++j) before += times[j] > mine || (times[j] == mine && j < i);
    sorted[before] = make_int2(order[i], mine);
  }
  __syncthreads();
}

// A list of units with the sorted tiles [from, from + count) split. Their parts are together, a part of all of them before the
// next part, so that what runs together reads the same heads; ahead of them are `ahead` whole tiles, those that take longer.
struct UnitList {
  int from, count, ahead;

  // A warp, all lanes of it.
  __device__ UnitList(const BwdRowParams& p, int from_, int count_, const int2 (&sorted)[kMaxListed]) : from(from_), count(count_), ahead(from_) {
    for (int base = from + count; base < p.num_tiles && count > 0; base += 32) {
      const int i = base + threadIdx.x % 32;
      ahead += __popc(__ballot_sync(0xffffffff, i < p.num_tiles && kSplitParts * sorted[i].y >= sorted[from].y));
    }
  }
  __device__ int units(const BwdRowParams& p) const { return (p.num_tiles + count * (kSplitParts - 1)) * p.heads_kv; }

  struct Unit {
    int tile, head, part, slot;  // `tile` among the sorted; `slot` counts from one, 0 for a whole tile
  };
  __device__ Unit unit(const BwdRowParams& p, int number) const {
    const int heads = p.heads_kv, in_split = number - ahead * heads, slots = count * heads;
    if (in_split >= 0 && in_split < slots * kSplitParts)
      return {from + in_split % slots / heads, in_split % heads, in_split / slots, in_split % slots + 1};
    const int rank = (in_split < 0 ? number : number - slots * kSplitParts) / heads;
    return {rank < from ? rank : rank + count, number % heads, 0, 0};
  }
  __device__ unsigned time(const BwdRowParams& p, int number, const int2 (&sorted)[kMaxListed]) const {
    const Unit u = unit(p, number);
    return (u.slot > 0 ? sorted[u.tile].y / kSplitParts : sorted[u.tile].y) + kUnitTime;
  }
};

// One warp: when the last unit of a list ends, where each goes to the multiprocessor that is free first, and the parts are added
// up. Lane l keeps when multiprocessors l, l + 32, ... will be free.
__device__ inline unsigned end_of_units(const BwdRowParams& p, const UnitList& list, const int2 (&sorted)[kMaxListed]) {
  constexpr int kPlaces = kMaxWave / 32;
  const int lane = threadIdx.x % 32, units = list.units(p), places = min(p.processors, units);
  unsigned ends[kPlaces], last = 0;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    ends[i] = lane + 32 * i < places ? list.time(p, lane + 32 * i, sorted) : ~0u;
    if (lane + 32 * i < places) last = max(last, ends[i]);
  }
  for (int base = places; base < units; base += 32) {
    const unsigned time = base + lane < units ? list.time(p, base + lane, sorted) : 0;
    const int left = min(32, units - base);
    for (int j = 0; j < left; ++j) {
      unsigned mine = ~0u;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) mine = min(mine, ends[i]);
      const unsigned first = __reduce_min_sync(0xffffffff, mine), end = first + __shfl_sync(0xffffffff, time, j);
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
  return __reduce_max_sync(0xffffffff, last) + kSlotTime * list.count * p.heads_kv;
}

// Which of the sorted tiles are split in the i-th of eight ways: first, and how many. None where there is no room for the parts.
__device__ inline int2 split_way(const BwdRowParams& p, int i) {
  const int n = p.num_tiles;
  const int2 way = i < 5 ? make_int2(0, i) : i == 5 ? make_int2(n / 16, n / 4 - n / 16) : make_int2(n / 2, i == 6 ? n / 4 : n - n / 2);
  return way.y <= p.split_tiles ? way : make_int2(0, 0);
}

// One CTA of kRowThreads. Lists the units in the way that is likely to end soonest, a warp for each; split ones cost more than
// their time, so they must gain 2%. Depends on the device, and not on what is left free.
__device__ inline void choose_units(const BwdRowParams& p) {
  constexpr int kWays = kRowThreads / 32;
  static_assert(kWays == 8, "see split_way");
  __shared__ int2 sorted[kMaxListed];
  __shared__ unsigned ends[kWays];
  sort_tiles(p, sorted);
  const int2 mine = split_way(p, threadIdx.x / 32);
  const unsigned end = end_of_units(p, UnitList(p, mine.x, mine.y, sorted), sorted);
  if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = end;
  __syncthreads();
  int best = 1;
  for (int i = 2; i < kWays; ++i) best = ends[i] < ends[best] ? i : best;
  const int2 way = split_way(p, ends[best] < ends[0] / 50 * 49 ? best : 0);
  const UnitList list(p, way.x, way.y, sorted);
  for (int number = threadIdx.x; number < list.units(p); number += kRowThreads) {
    const UnitList::Unit u = list.unit(p, number);
    const int walk = static_cast<int>(number < p.places ? Way::kEarly : Way::kForwards) << kWayBit;
    p.units[number] = make_int4(sorted[u.tile].x, u.head, u.part | walk | u.slot << kSlotBit, 0);
  }
  if (threadIdx.x > 0) return;
  p.workspace[kSplitWord] = list.count * p.heads_kv;
  p.workspace[kUnitsWord] = list.units(p);
  p.workspace[kFirstSplitWord] = list.ahead * p.heads_kv;
}

// From the fourth word of a unit: in which slot a split one leaves its dk and dv, counted from one; zero for a whole one.
__device__ __forceinline__ int split_slot(int word) { return word >> kSlotBit; }

// Query heads of a unit.
template <typename C>
__device__ __forceinline__ int heads_of_unit(const BwdKernelParams& p, int word) {
  return C::kSplit && split_slot(word) > 0 ? p.split_heads : p.heads_per_part;
}

}  // namespace magi
