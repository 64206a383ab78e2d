// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs take the tiles of keys, as work tiles of some query heads each.
//
// What runs at the same time is to share queries in L2, so tiles go by kv head, and of a kv head by
// parts of its query heads; within a part the longest come first. Tiles of the last kv head are in
// small parts, so that CTAs end together. Long tiles, which would keep a CTA busy for half of the
// kernel's time and more, come before all others, in small parts, too.
#pragma once

#include "ffa/sm90/index/bwd/keys/params.h"
#include "ffa/sm90/index/sum_before.cuh"

namespace magi {

constexpr int kLengthClasses = 2 * kPrepareThreads;  // by which tiles are sorted

struct TileCensus {
  unsigned long long entries;                  // of all tiles
  int32_t long_tiles, long_before, long_here;  // of all kv heads, of those before, of this one
};

// Whether a tile has more than half of what each CTA would have if work could be shared out evenly.
__device__ __forceinline__ bool is_long(int count, unsigned long long entries, int num_ctas) {
  return 2ull * count * num_ctas > entries;
}

__device__ __forceinline__ void write_parts(const QueryListParams& p, int at, int step, int number,
                                            int heads_of_part, int granules) {
  for (int first = 0; first < p.group; first += heads_of_part, at += step)
    p.order.work_tiles[at] =
        make_int2(number, first | min(heads_of_part, p.group - first) << 8 | granules << 16);
}

// One CTA for a kv head.
__global__ void __launch_bounds__(kPrepareThreads) index_order_tiles(const QueryListParams p) {
  __shared__ TileCensus all;
  __shared__ int places[kLengthClasses];
  __shared__ uint32_t warps[kPrepareWarps];
  const int head = blockIdx.x, tiles = p.lists.num_tiles, thread = threadIdx.x;
  const int count = tiles * p.heads_kv;
  if (thread == 0) all = TileCensus{};
  for (int i = thread; i < kLengthClasses; i += kPrepareThreads) places[i] = 0;
  __syncthreads();
  unsigned long long entries = 0;
  for (int i = thread; i < count; i += kPrepareThreads) entries += p.lists.tiles[i].x;
  atomicAdd(&all.entries, entries);
  __syncthreads();
  entries = all.entries;
  int long_tiles = 0, before = 0, here = 0;
  for (int i = thread; i < count; i += kPrepareThreads) {
    if (!is_long(p.lists.tiles[i].x, entries, p.num_ctas)) continue;
    ++long_tiles;
    before += i < head * tiles;
    here += i / tiles == head;
  }
  atomicAdd(&all.long_tiles, long_tiles);
  atomicAdd(&all.long_before, before);
  atomicAdd(&all.long_here, here);
  __syncthreads();
  long_tiles = all.long_tiles;
  before = all.long_before;
  const int short_here = tiles - all.long_here;
  // The longest that is not long is of class 0, an empty one of the last.
  const unsigned long long longest = max(entries / (2ull * p.num_ctas), 1ull);
  auto length_class = [&](int length) {
    const unsigned long long rank = length * (kLengthClasses - 1ull) / longest;
    return kLengthClasses - 1 - static_cast<int>(min(rank, kLengthClasses - 1ull));
  };
  const int2* mine = p.lists.tiles + head * tiles;
  for (int i = thread; i < tiles; i += kPrepareThreads)
    if (!is_long(mine[i].x, entries, p.num_ctas)) atomicAdd(places + length_class(mine[i].x), 1);
  __syncthreads();
  const int first = places[2 * thread], second = places[2 * thread + 1];
  int total;
  const int start = sum_before(first + second, warps, &total);
  places[2 * thread] = start;
  places[2 * thread + 1] = start + first;
  if (thread == 0) all.long_here = 0;
  __syncthreads();
  const bool is_last = head + 1 == p.heads_kv;
  const int heads_of_part = is_last ? p.order.heads_of_small_part : p.order.heads_of_part;
  const int small_parts = (p.group - 1) / p.order.heads_of_small_part + 1,
            parts = (p.group - 1) / p.order.heads_of_part + 1;
  const int first_short = long_tiles * small_parts + (head * tiles - before) * parts;
  for (int i = thread; i < tiles; i += kPrepareThreads) {
    const int2 tile = mine[i];
    if (is_long(tile.x, entries, p.num_ctas)) {
      const int place = before + atomicAdd(&all.long_here, 1);
      write_parts(p, place * small_parts, 1, head * tiles + i, p.order.heads_of_small_part, tile.y);
    } else {
      const int place = first_short + atomicAdd(places + length_class(tile.x), 1);
      write_parts(p, place, short_here, head * tiles + i, heads_of_part, tile.y);
    }
  }
  if (is_last && thread == 0) *p.order.count = first_short + short_here * small_parts;
}

}  // namespace magi
