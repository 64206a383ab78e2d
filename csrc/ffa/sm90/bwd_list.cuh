// SPDX-License-Identifier: Apache-2.0
// Lists the units of short documents anew, and chooses which are split so that all multiprocessors end together: see bwd_split.cuh.
//
// What runs at the same time should read the same blocks, or Q, dO and dq come from device memory several times. A tile with the
// end of one document and the start of the next is best cut there: then each part runs beside the other tiles of its document.
// Some heads of the longest tiles run beside nothing of their kind, which costs some 20%; still they pay where one tile would be
// at work when all others are through. Heads of the shorter tiles fill the gaps.
#pragma once

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_split.cuh"

namespace magi {

// Times are in eighths of a step that needs no mask.
constexpr int kStepTime = 8, kMaskedStepTime = 9;
constexpr int kUnitTime = 21;  // to start and end a unit
constexpr int kSlotTime = 1;   // to add up the parts of a split one

// Bounded, so that sums fit.
__device__ inline int time_of_steps(const BwdRowParams& p, int steps, int masked) {
  return min(kStepTime * steps + (kMaskedStepTime - kStepTime) * masked, 1 << 20) * p.heads_per_part;
}

// Blocks of a layer, and those of them that need masks.
__device__ inline int2 blocks_of_layer(const int32_t* plan, int layer) {
  const int2 blocks = layer_blocks<kQueryBlock>(plan, layer);
  const int4* groups = reinterpret_cast<const int4*>(layer_record(plan, layer) + 8);
  const int first = (max(groups[0].z, groups[1].z) + kQueryBlock - 1) / kQueryBlock, last = min(groups[0].w, groups[1].w) / kQueryBlock;
  return make_int2(blocks.y - blocks.x, blocks.y - blocks.x - max(min(last, blocks.y) - max(first, blocks.x), 0));
}

// How long a tile takes for all heads of a unit, without start and end. Of many layers the planner's count will do, in which a
// block has twice as many queries.
__device__ inline int time_of_tile(const BwdRowParams& p, int tile) {
  constexpr int kCounted = 16;
  const int2 layers = layers_of_tile(p.plan, tile);
  if (layers.y > kCounted) {
    const int tiles_at = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_tiles;
    const int blocks = p.plan[tiles_at + 8 * tile + offsetof(magi_tile_desc, num_blocks) / 4];
    return time_of_steps(p, 2 * blocks, 2 * blocks);
  }
  int2 sum = make_int2(0, 0);
  for (int i = 0; i < layers.y; ++i) {
    const int2 blocks = blocks_of_layer(p.plan, layers.x + i);
    sum = make_int2(sum.x + blocks.x, sum.y + blocks.y);
  }
  return time_of_steps(p, sum.x, sum.y);
}

// Tiles and their times, the longest first, ties as in the plan.
using SortedTiles = int2[kMaxListed];

// One CTA of kRowThreads.
__device__ inline void sort_tiles(const BwdRowParams& p, SortedTiles& sorted) {
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

// A row of a list. `tile` is its number among the sorted, `part` the fourth word but for way and slot, `slot` counts from one and
// is 0 for a whole tile.
struct ListedUnit {
  int tile, head, part, slot, time;
};

// The list with the sorted tiles [from, from + count) split by heads, none if there is no room. Their parts are together, a part of
// all of them before the next part; ahead of them are `ahead` whole tiles, those that take longer.
//
// Here as below functions are called by whole warps.
struct HeadsList {
  int from, count, ahead;

  __device__ HeadsList(const BwdRowParams& p, int from_, int count_, const SortedTiles& sorted)
      : from(from_), count(count_ <= p.split_tiles ? count_ : 0), ahead(from_) {
    for (int base = from + count; base < p.num_tiles && count > 0; base += 32) {
      const int i = base + threadIdx.x % 32;
      ahead += __popc(__ballot_sync(0xffffffff, i < p.num_tiles && kSplitParts * sorted[i].y >= sorted[from].y));
    }
  }
  __device__ int units(const BwdRowParams& p) const { return (p.num_tiles + count * (kSplitParts - 1)) * p.heads_kv; }
  __device__ ListedUnit unit(const BwdRowParams& p, int number, const SortedTiles& sorted) const {
    const int heads = p.heads_kv, in_split = number - ahead * heads, slots = count * heads;
    const bool is_part = in_split >= 0 && in_split < slots * kSplitParts;
    const int rank = (in_split < 0 ? number : number - slots * kSplitParts) / heads;
    const int tile = is_part ? from + in_split % slots / heads : min(rank < from ? rank : rank + count, p.num_tiles - 1);
    const int time = sorted[tile].y / (is_part ? kSplitParts : 1) + kUnitTime;
    return {tile, is_part ? in_split % heads : number % heads, is_part ? in_split / slots : 0, is_part ? in_split % slots + 1 : 0, time};
  }
  // Of the split tile with that number: which of the sorted, and how many parts.
  __device__ int2 split_tile(const BwdRowParams& p, int number, const SortedTiles& sorted) const { return make_int2(from + number, kSplitParts); }
};

// Where the queries of the first document of a tile end, if those of others follow: as a block, or 0. For tiles of one layer.
__device__ inline int cut_of_tile(const BwdRowParams& p, int tile) {
  const int2 layers = layers_of_tile(p.plan, tile);
  if (layers.y != 1) return 0;
  const int32_t* record = layer_record(p.plan, layers.x);
  int end = INT_MAX;
  for (int row = threadIdx.x % 32; row < kTileKeys; row += 32) {
    const int2 queries = *reinterpret_cast<const int2*>(record + sizeof(magi_layer) / 4 + 2 * row);
    if (queries.x < queries.y) end = min(end, queries.y);
  }
  const int cut = __reduce_min_sync(0xffffffff, end) / kQueryBlock;
  const int2 blocks = layer_blocks<kQueryBlock>(p.plan, layers.x);
  return cut > blocks.x && cut < blocks.y && cut < kBehindCut ? cut : 0;
}

// Where each of the longest tiles is cut, or 0, and its blocks.
struct Cut {
  int at, first, end;
};
constexpr int kLooked = 8;  // tiles
using Cuts = Cut[kLooked];

// A warp looks at each.
__device__ inline void find_cuts(const BwdRowParams& p, const SortedTiles& sorted, Cuts& cuts) {
  static_assert(kLooked == kRowThreads / 32, "a warp for each");
  const int mine = threadIdx.x / 32;
  if (mine < p.num_tiles) {
    const int at = cut_of_tile(p, sorted[mine].x);
    const int2 blocks = at > 0 ? layer_blocks<kQueryBlock>(p.plan, layers_of_tile(p.plan, sorted[mine].x).x) : make_int2(0, 0);
    cuts[mine] = {at, blocks.x, blocks.y};
  }
  __syncthreads();
}

// The list with one or two of the longest tiles cut, the parts where their time puts them.
struct CutsList {
  int count = 0;              // that are cut
  int first = 0, second = 0;  // which of the sorted those are
  // Of part l, in lane l: its place among tiles and parts, where its tile is cut, its time. Two parts a tile.
  int place = -1, cut = 0, time = 0;

  __device__ CutsList(const BwdRowParams& p, int wanted, const SortedTiles& sorted, const Cuts& cuts) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < min(p.num_tiles, kLooked) && count < min(wanted, p.split_tiles); ++i) {
      const Cut found = cuts[i];
      if (found.at == 0) continue;
      (count == 0 ? first : second) = i;
      const int mine = lane & 1 ? found.end - found.at : found.at - found.first;
      if (lane / 2 == count) {
        cut = found.at;
        time = time_of_steps(p, mine, mine);
      }
      ++count;
    }
    for (int i = 0; i < 2 * count; ++i) {
      const int other = __shfl_sync(0xffffffff, time, i);
      int before = __popc(__ballot_sync(0xffffffff, lane < 2 * count && (time > other || (time == other && lane < i))));
      for (int base = 0; base < p.num_tiles; base += 32) {
        const int tile = base + lane;
        before += __popc(__ballot_sync(0xffffffff, tile < p.num_tiles && !is_split(tile) && sorted[tile].y >= other));
      }
      if (lane == i) place = before;
    }
  }
  __device__ bool is_split(int tile) const { return (count > 0 && tile == first) || (count > 1 && tile == second); }
  __device__ int units(const BwdRowParams& p) const { return (p.num_tiles + count) * p.heads_kv; }
  __device__ ListedUnit unit(const BwdRowParams& p, int number, const SortedTiles& sorted) const {
    const int mine = number / p.heads_kv, head = number % p.heads_kv;
    int tile = mine, part = -1;
    for (int i = 0; i < 2 * count; ++i) {
      const int other = __shfl_sync(0xffffffff, place, i);
      tile -= other < mine;
      if (other == mine) part = i;
    }
    const int its_cut = __shfl_sync(0xffffffff, cut, max(part, 0)), its_time = __shfl_sync(0xffffffff, time, max(part, 0));
    if (part >= 0) {
      const int word = 1 << kCutBit | (part & 1 ? kBehindCut : 0) | its_cut;
      return {part < 2 ? first : second, head, word, part / 2 * p.heads_kv + head + 1, its_time + kUnitTime};
    }
    tile += count > 0 && tile >= first;
    tile += count > 1 && tile >= second;
    tile = min(tile, p.num_tiles - 1);
    return {tile, head, 0, 0, sorted[tile].y + kUnitTime};
  }
  __device__ int2 split_tile(const BwdRowParams& p, int number, const SortedTiles& sorted) const { return make_int2(number == 0 ? first : second, 2); }
};

// When the last unit of a list ends, where each goes to the multiprocessor that is free first, and the parts are added up; and what
// all of them take. Lane l keeps when multiprocessors l, l + 32, ... will be free.
template <int kPlaces, typename List>
__device__ uint2 end_on_places(const BwdRowParams& p, const List& list, const SortedTiles& sorted) {
  const int lane = threadIdx.x % 32, units = list.units(p), places = min(p.processors, units);
  unsigned ends[kPlaces], last = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const unsigned time = list.unit(p, lane + 32 * i, sorted).time;
    ends[i] = lane + 32 * i < places ? time : ~0u;
    if (lane + 32 * i >= places) continue;
    last = max(last, time);
    sum += time;
  }
  for (int base = places; base < units; base += 32) {
    const unsigned found = list.unit(p, base + lane, sorted).time, time = base + lane < units ? found : 0;
    sum += time;
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
  last = __reduce_max_sync(0xffffffff, last) + kSlotTime * list.count * p.heads_kv;
  return make_uint2(last, __reduce_add_sync(0xffffffff, sum));
}

template <typename List>
__device__ uint2 end_of_units(const BwdRowParams& p, const List& list, const SortedTiles& sorted) {
  constexpr int kFew = 5;  // each more takes longer
  return p.processors <= 32 * kFew ? end_on_places<kFew>(p, list, sorted) : end_on_places<kMaxWave / 32>(p, list, sorted);
}

// Writes the list: tile, kv head, fourth word of each unit; behind it tile, kv head, number of parts of each slot. And how many units
// there are of each tile.
template <typename List>
__device__ void write_list(const BwdRowParams& p, const List& list, const SortedTiles& sorted) {
  const int units = list.units(p), slots = list.count * p.heads_kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 32 * warp; base < units; base += kRowThreads) {
    const ListedUnit u = list.unit(p, base + lane, sorted);
    const int walk = static_cast<int>(base + lane < p.places ? Way::kEarly : Way::kForwards) << kWayBit;
    const int word = u.part | walk | u.slot << kSlotBit;
    if (base + lane >= units) continue;
    const int tile = sorted[u.tile].x;
    p.units[base + lane] = make_int4(tile, u.head, word, 0);
    p.completion.left[tile * p.heads_kv + u.head] = u.slot > 0 ? list.split_tile(p, (u.slot - 1) / p.heads_kv, sorted).y : 1;
  }
  for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
    const int2 tile = list.split_tile(p, slot / p.heads_kv, sorted);
    p.units[units + slot] = make_int4(sorted[tile.x].x, slot % p.heads_kv, tile.y, 0);
  }
  if (threadIdx.x == 0) {
    p.workspace[kSplitWord] = slots;
    p.workspace[kUnitsWord] = units;
  }
}

// One CTA of kRowThreads, beside the kernel that prepares the rest. A warp tries each way: nothing split; a tile or two cut; one
// to four of the longest by heads. Of the shorter half by heads it is known that those end about 8% after all multiprocessors would
// if they shared the work evenly, and not before the longest tile. The choice depends on the device, and not on what is left free.
// A template, because several translation units have it.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_list(const BwdRowParams p) {
  constexpr int kWays = 7;
  static_assert(kThreads == kRowThreads && kWays <= kThreads / 32, "a warp for each");
  __shared__ int2 sorted[kMaxListed];
  __shared__ uint2 found[kWays];
  start_next_kernel();
  for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads) p.workspace[i] = 0;
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  sort_tiles(p, sorted);
  __shared__ Cuts cuts;
  find_cuts(p, sorted, cuts);
  const int warp = threadIdx.x / 32;
  if (warp < kWays) {
    const uint2 end = warp < 3 ? end_of_units(p, CutsList(p, warp, sorted, cuts), sorted) : end_of_units(p, HeadsList(p, 0, warp - 2, sorted), sorted);
    if (threadIdx.x % 32 == 0) found[warp] = end;
  }
  __syncthreads();
  const float whole = static_cast<float>(found[0].x), longest = static_cast<float>(sorted[0].y + kUnitTime);
  const float shorter = fmaxf(1.08f * static_cast<float>(found[0].y) / static_cast<float>(p.processors), longest);
  float best = whole > 1.06f * shorter ? 1.03f * shorter : whole;
  int way = best < whole ? kWays : 0;
  for (int i = 1; i < kWays; ++i) {
    const float end = (i < 3 ? 1.02f : way == kWays ? 1.06f : 1.2f) * static_cast<float>(found[i].x);
    if (end >= best) continue;
    best = end;
    way = i;
  }
  if (way < 3)
    write_list(p, CutsList(p, way, sorted, cuts), sorted);
  else
    write_list(p, way < kWays ? HeadsList(p, 0, way - 2, sorted) : HeadsList(p, p.num_tiles / 2, p.num_tiles - p.num_tiles / 2, sorted), sorted);
}

}  // namespace magi
