// SPDX-License-Identifier: Apache-2.0
// How long the tiles of short documents take, and the ways to list their units among which bwd_list.cuh chooses: which row of a list is
// which unit.
#pragma once

#include <climits>

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_split.cuh"

namespace magi {

// Times are in eighths of a step that needs no mask.
constexpr int kStepTime = 8, kMaskedStepTime = 9;
constexpr int kUnitTime = 21;  // to start and end a unit

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
  __device__ int splits() const { return count; }
  // Of the split tile with that number: which of the sorted, and how many parts.
  __device__ int2 split_tile(int number) const { return make_int2(from + number, kSplitParts); }
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

// The list with one or two of the longest tiles cut, the parts where their time puts them; and some of the shortest split by heads,
// a part of all of them before the next part, behind all others.
struct CutsList {
  int count = 0;              // that are cut
  int first = 0, second = 0;  // which of the sorted those are
  int from;                   // the first of the sorted that is split by heads
  int shortest;               // how many are
  // Of part l, in lane l: its place among tiles and parts, where its tile is cut, its time. Two parts a tile.
  int place = -1, cut = 0, time = 0;

  // None is split by heads if there is no room.
  __device__ CutsList(const BwdRowParams& p, int wanted, int shortest_, const SortedTiles& sorted, const Cuts& cuts)
      : from(p.num_tiles - shortest_), shortest(shortest_) {
    const int lane = threadIdx.x % 32;
    if (from < kLooked || wanted + shortest > p.split_tiles) {
      from = p.num_tiles;
      shortest = 0;
    }
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
      for (int base = 0; base < from; base += 32) {
        const int tile = base + lane;
        before += __popc(__ballot_sync(0xffffffff, tile < from && !cuts_tile(tile) && sorted[tile].y >= other));
      }
      if (lane == i) place = before;
    }
  }
  __device__ bool cuts_tile(int tile) const { return (count > 0 && tile == first) || (count > 1 && tile == second); }
  __device__ int units(const BwdRowParams& p) const { return (p.num_tiles + count + shortest * (kSplitParts - 1)) * p.heads_kv; }
  __device__ ListedUnit unit(const BwdRowParams& p, int number, const SortedTiles& sorted) const {
    const int mine = number / p.heads_kv, head = number % p.heads_kv;
    int tile = mine, part = -1;
    for (int i = 0; i < 2 * count; ++i) {
      const int other = __shfl_sync(0xffffffff, place, i);
      tile -= other < mine;
      if (other == mine) part = i;
    }
    const int its_cut = __shfl_sync(0xffffffff, cut, max(part, 0)), its_time = __shfl_sync(0xffffffff, time, max(part, 0));
    const int in_split = number - (from + count) * p.heads_kv, slots = shortest * p.heads_kv;
    if (in_split >= 0 && in_split < slots * kSplitParts) {
      tile = from + in_split % slots / p.heads_kv;
      return {tile, head, in_split / slots, count * p.heads_kv + in_split % slots + 1, sorted[tile].y / kSplitParts + kUnitTime};
    }
    if (part >= 0) {
      const int word = 1 << kCutBit | (part & 1 ? kBehindCut : 0) | its_cut;
      return {part < 2 ? first : second, head, word, part / 2 * p.heads_kv + head + 1, its_time + kUnitTime};
    }
    tile += count > 0 && tile >= first;
    tile += count > 1 && tile >= second;
    tile = min(tile, p.num_tiles - 1);
    return {tile, head, 0, 0, sorted[tile].y + kUnitTime};
  }
  __device__ int splits() const { return count + shortest; }
  __device__ int2 split_tile(int number) const {
    return number < count ? make_int2(number == 0 ? first : second, 2) : make_int2(from + number - count, kSplitParts);
  }
};

}  // namespace magi
