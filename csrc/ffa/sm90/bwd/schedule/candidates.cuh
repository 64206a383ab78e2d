// SPDX-License-Identifier: Apache-2.0
// How long the tiles of short documents take, and the ways to list their work tiles among which
// bwd/schedule/select_schedule.cuh chooses: which row of a list is which work tile.
#pragma once

#include <climits>

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"

namespace magi {

// Times are in eighths of a step that needs no mask. Start and end of a work tile are those of
// narrow steps; in wide ones they are a half of a step less, which decides nothing.
constexpr int kStepTime = 8, kMaskedStepTime = 9;
constexpr int kWorkTileTime = 21;  // to start and end a work tile

// Bounded, so that sums fit.
__device__ inline int time_of_steps(const BwdRowParams& p, int steps, int masked) {
  return min(kStepTime * steps + (kMaskedStepTime - kStepTime) * masked, 1 << 20) *
         p.heads_per_split;
}

// Blocks of a segment, and those of them that need masks.
template <int kBlockM>
__device__ inline int2 blocks_of_segment(const int32_t* plan, int segment) {
  const int2 blocks = segment_blocks<kBlockM>(plan, segment);
  const int4* groups = reinterpret_cast<const int4*>(segment_record(plan, segment) + 8);
  const int first = (max(groups[0].z, groups[1].z) + kBlockM - 1) / kBlockM,
            last = min(groups[0].w, groups[1].w) / kBlockM;
  return make_int2(blocks.y - blocks.x,
                   blocks.y - blocks.x - max(min(last, blocks.y) - max(first, blocks.x), 0));
}

// How long a tile takes for all heads of a work tile, without start and end. Of many segments the
// planner's count will do, in which a block has kTileBlockN queries.
template <int kBlockM>
__device__ inline int time_of_tile(const BwdRowParams& p, int tile) {
  constexpr int kCounted = 16;
  const int2 segments = segments_of_tile(p.plan, tile);
  if (segments.y > kCounted) {
    const int tiles_at = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_tiles;
    const int blocks =
        (p.plan[tiles_at + 8 * tile + offsetof(magi_tile_desc, num_blocks) / 4] * kTileBlockN +
         kBlockM - 1) /
        kBlockM;
    return time_of_steps(p, blocks, blocks);
  }
  int2 sum = make_int2(0, 0);
  for (int i = 0; i < segments.y; ++i) {
    const int2 blocks = blocks_of_segment<kBlockM>(p.plan, segments.x + i);
    sum = make_int2(sum.x + blocks.x, sum.y + blocks.y);
  }
  return time_of_steps(p, sum.x, sum.y);
}

// Tiles and their times, the longest first, ties as in the plan.
using SortedTiles = int2[kMaxWorkList];

// One CTA of kRowThreads.
template <int kBlockM>
__device__ inline void sort_tiles(const BwdRowParams& p, SortedTiles& sorted) {
  __shared__ int times[kMaxWorkList];
  const int32_t* order =
      p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads)
    times[i] = time_of_tile<kBlockM>(p, order[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_tiles; i += kRowThreads) {
    const int mine = times[i];
    int before = 0;
    for (int j = 0; j < p.num_tiles; ++j) before += times[j] > mine || (times[j] == mine && j < i);
    sorted[before] = make_int2(order[i], mine);
  }
  __syncthreads();
}

// A row of a list. `tile` is its number among the sorted, `part` the fourth word but for way and
// partial, `partial` counts from one and is 0 for a whole tile.
struct ListedWorkTile {
  int tile, head, part, slot, time;
};

// Where the queries of the first document of a tile end, if those of others follow: as a block, or
// 0. For tiles of one segment.
template <int kBlockM>
__device__ inline int cut_of_tile(const BwdRowParams& p, int tile) {
  const int2 segments = segments_of_tile(p.plan, tile);
  if (segments.y != 1) return 0;
  const int32_t* record = segment_record(p.plan, segments.x);
  int end = INT_MAX;
  for (int row = threadIdx.x % 32; row < kTileBlockN; row += 32) {
    const int2 queries =
        *reinterpret_cast<const int2*>(record + sizeof(magi_tile_segment) / 4 + 2 * row);
    if (queries.x < queries.y) end = min(end, queries.y);
  }
  const int cut = __reduce_min_sync(0xffffffff, end) / kBlockM;
  const int2 blocks = segment_blocks<kBlockM>(p.plan, segments.x);
  return cut > blocks.x && cut < blocks.y && cut < kBehindCut ? cut : 0;
}

// Where each of the longest tiles is cut, or 0, and its blocks.
struct Cut {
  int at, first, end;
};
constexpr int kLooked = 8;  // tiles
using Cuts = Cut[kLooked];

// A warp looks at each.
template <int kBlockM>
__device__ inline void find_cuts(const BwdRowParams& p, const SortedTiles& sorted, Cuts& cuts) {
  static_assert(kLooked == kRowThreads / 32, "a warp for each");
  const int mine = threadIdx.x / 32;
  if (mine < p.num_tiles) {
    const int at = cut_of_tile<kBlockM>(p, sorted[mine].x);
    const int2 blocks =
        at > 0 ? segment_blocks<kBlockM>(p.plan, segments_of_tile(p.plan, sorted[mine].x).x)
               : make_int2(0, 0);
    cuts[mine] = {at, blocks.x, blocks.y};
  }
  __syncthreads();
}

// A list: up to two of the longest tiles are cut, and the sorted tiles [from, from + count) split
// by heads, as many as there is room for. Rows of whole tiles and sides of cuts come where their
// time puts them; parts by heads are together, a part of all of them before the next part, behind
// those rows that take longer.
//
// Here as below functions are called by whole warps.
struct WorkList {
  int from, count, ahead = 0;
  int cuts = 0, first = 0, second = 0;  // tiles that are cut, and which of the sorted those are
  // Lane l holds for side l its place among rows, where its tile is cut, its time. Two sides a
  // tile.
  int place = -1, cut = 0, time = 0;

  __device__ WorkList(const BwdRowParams& p, int wanted, int from_, int count_,
                      const SortedTiles& sorted, const Cuts& found)
      : from(from_) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < min(min(p.num_tiles, from), kLooked) && cuts < min(wanted, p.split_tiles);
         ++i) {
      if (found[i].at == 0) continue;
      (cuts == 0 ? first : second) = i;
      const int mine = lane & 1 ? found[i].end - found[i].at : found[i].at - found[i].first;
      if (lane / 2 == cuts) {
        cut = found[i].at;
        time = time_of_steps(p, mine, mine);
      }
      ++cuts;
    }
    count = min(min(count_, p.num_tiles - from), p.split_tiles - cuts);
    for (int i = 0; i < 2 * cuts; ++i) {
      const int other = __shfl_sync(0xffffffff, time, i);
      const int before =
          __popc(__ballot_sync(0xffffffff,
                               lane < 2 * cuts && (time > other || (time == other && lane < i)))) +
          longer(p, sorted, other);
      if (lane == i) place = before;
    }
    if (count == 0) return;
    const int part = (sorted[from].y + kListedHeadSplits - 1) / kListedHeadSplits;
    ahead = longer(p, sorted, part) +
            __popc(__ballot_sync(0xffffffff, lane < 2 * cuts && time >= part));
  }
  __device__ bool is_whole(int tile) const {
    return !(cuts > 0 && tile == first) && !(cuts > 1 && tile == second) &&
           (tile < from || tile >= from + count);
  }
  // How many whole tiles take at least so long.
  __device__ int longer(const BwdRowParams& p, const SortedTiles& sorted, int than) const {
    int found = 0;
    for (int base = 0; base < p.num_tiles; base += 32) {
      const int tile = base + threadIdx.x % 32;
      found += __popc(__ballot_sync(
          0xffffffff, tile < p.num_tiles && is_whole(tile) && sorted[tile].y >= than));
    }
    return found;
  }
  __device__ int work_tiles(const BwdRowParams& p) const {
    return (p.num_tiles + cuts + count * (kListedHeadSplits - 1)) * p.heads_kv;
  }
  __device__ ListedWorkTile work_tile(const BwdRowParams& p, int number,
                                      const SortedTiles& sorted) const {
    const int slots = count * p.heads_kv, in_split = number - ahead * p.heads_kv,
              head = number % p.heads_kv;
    const bool is_part = in_split >= 0 && in_split < slots * kListedHeadSplits;
    const int row = (in_split < 0 ? number : number - slots * kListedHeadSplits) / p.heads_kv;
    int tile = row, side = -1;
    for (int i = 0; i < 2 * cuts; ++i) {
      const int other = __shfl_sync(0xffffffff, place, i);
      tile -= other < row;
      if (other == row) side = i;
    }
    const int its_cut = __shfl_sync(0xffffffff, cut, max(side, 0)),
              its_time = __shfl_sync(0xffffffff, time, max(side, 0));
    if (is_part) {
      tile = from + in_split % slots / p.heads_kv;
      return {tile, head, in_split / slots, cuts * p.heads_kv + in_split % slots + 1,
              sorted[tile].y / kListedHeadSplits + kWorkTileTime};
    }
    if (side >= 0) {
      const int word = 1 << kCutBit | (side & 1 ? kBehindCut : 0) | its_cut;
      return {side < 2 ? first : second, head, word, side / 2 * p.heads_kv + head + 1,
              its_time + kWorkTileTime};
    }
    tile += cuts > 0 && tile >= first;
    tile += cuts > 1 && tile >= second;
    tile += tile >= from ? count : 0;
    tile = min(tile, p.num_tiles - 1);
    return {tile, head, 0, 0, sorted[tile].y + kWorkTileTime};
  }
  // Where a work tile stands in the list: whole tiles that take as long are listed head by head,
  // not tile by tile. That ends as soon, and the first heads are complete when others begin, so
  // that less is left to the last kernel at the end (bwd/rows/completion.cuh).
  __device__ int row(const BwdRowParams& p, int number, const ListedWorkTile& u,
                     const SortedTiles& sorted) const {
    if (u.slot > 0) return number;
    int alike = 0, before = 0;
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      if (sorted[tile].y != sorted[u.tile].y || !is_whole(tile)) continue;
      ++alike;
      before += tile < u.tile;
    }
    return number - (before * p.heads_kv + u.head) + u.head * alike + before;
  }
  // Tiles that are split, those that are cut first; of one of them which of the sorted it is, and
  // its parts.
  __device__ int splits() const { return cuts + count; }
  __device__ int2 split_tile(int number) const {
    return number < cuts ? make_int2(number == 0 ? first : second, 2)
                         : make_int2(from + number - cuts, kListedHeadSplits);
  }
};

// Ways to list work tiles, among which bwd/schedule/select_schedule.cuh chooses: nothing split, a
// tile or two cut; one to four of the longest by heads; the shorter half by heads; two cut, and the
// two shortest by heads; and others by heads beside one or two cut: the half of the tiles from 7/16
// on, the second quarter, 3/8 of them from 3/8 on.
enum ListWay : int {
  kWhole = 0,
  kLongestByHeads = 3,
  kShorterHalf = 7,
  kCutFilled = 8,
  kMiddleHalf = 9,
  kSecondQuarter = 10,
  kMiddle = 11
};

constexpr int kShortest = 2;  // tiles, of kCutFilled

__device__ inline WorkList list_of(const BwdRowParams& p, int traversal, const SortedTiles& sorted,
                                   const Cuts& found) {
  const int n = p.num_tiles;
  int cuts = 0, from = n, count = 0;
  if (traversal < kLongestByHeads) {
    cuts = traversal;
  } else if (traversal < kShorterHalf) {
    from = 0;
    count = traversal - kLongestByHeads + 1;
  } else if (traversal == kShorterHalf) {
    from = n / 2;
    count = n - from;
  } else if (traversal == kCutFilled) {
    cuts = 2;
    from = max(n - kShortest, 0);
    count = kShortest;
  } else {
    cuts = traversal == kMiddleHalf ? 1 : 2;
    from = n * (traversal == kMiddleHalf ? 7 : traversal == kSecondQuarter ? 4 : 6) / 16;
    count = n * (traversal == kMiddleHalf ? 8 : traversal == kSecondQuarter ? 4 : 6) / 16;
  }
  return WorkList(p, cuts, from, count, sorted, found);
}

}  // namespace magi
