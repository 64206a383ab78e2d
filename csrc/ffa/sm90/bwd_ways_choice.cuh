// SPDX-License-Identifier: Apache-2.0
// Chooses in which way the units of short documents are listed, so that all multiprocessors end together: by simulations of when the last
// unit ends.
//
// What runs at the same time should read the same blocks, or Q, dO and dq come from device memory several times. A tile with the
// end of one document and the start of the next is best cut there: then each part runs beside the other tiles of its document.
// Some heads of the longest tiles run beside nothing of their kind, which costs some 20%; still they pay where one tile would be
// at work when all others are through. Heads of the shorter tiles fill the gaps.
#pragma once

#include "bwd_ways.cuh"

namespace magi {

constexpr int kSlotTime = 1;  // to add up the parts of a split unit, in the units of bwd_ways.cuh
// Multiprocessors at least, for each tile and kv head that fills: with 44 kv heads of 4 query heads it took 1.2 times as long.
constexpr int kFewParts = 4;

// How many multiprocessors begin late, as they prepare rows until then (bwd_prepare_listed.cuh), and when.
struct Late {
  int processors = 0;
  unsigned time = 0;

  __device__ static Late of(const BwdRowParams& p) {
    const int processors = late_processors(p.processors);
    return {processors, static_cast<unsigned>(min(kBlockTime * p.query_blocks * p.heads_q / processors, kLongTime))};
  }
  static constexpr int64_t kBlockTime = 4, kLongTime = 1 << 24;  // of a block of a head
};

// When the last unit of a list ends, where each goes to the multiprocessor that is free first, and the parts are added up; and what
// all of them take. Some multiprocessors may begin late. Lane l keeps when multiprocessors l, l + 32, ... will be free.
template <int kPlaces>
__device__ uint2 end_on_places(const BwdRowParams& p, const UnitList& list, const SortedTiles& sorted, Late late) {
  const int lane = threadIdx.x % 32, units = list.units(p), places = min(p.processors, units), at_once = max(places - late.processors, 0);
  unsigned ends[kPlaces], last = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const unsigned time = list.unit(p, lane + 32 * i, sorted).time;
    ends[i] = lane + 32 * i < at_once ? time : lane + 32 * i < places ? late.time : ~0u;
    if (lane + 32 * i >= at_once) continue;
    last = max(last, time);
    sum += time;
  }
  for (int base = at_once; base < units; base += 32) {
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
  last = __reduce_max_sync(0xffffffff, last) + kSlotTime * list.splits() * p.heads_kv;
  return make_uint2(last, __reduce_add_sync(0xffffffff, sum));
}

__device__ inline uint2 end_of_units(const BwdRowParams& p, const UnitList& list, const SortedTiles& sorted, Late late) {
  constexpr int kFew = 5;  // each more takes longer
  return p.processors <= 32 * kFew ? end_on_places<kFew>(p, list, sorted, late) : end_on_places<kMaxWave / 32>(p, list, sorted, late);
}

// Which way to list units. A warp tries each of the first seven. Of the shorter half by heads it is known that those end about 8% after
// all multiprocessors would if they shared the work evenly, and not before the longest tile. What is chosen is then tried again beside
// others, now as some multiprocessors begin late: where each has two long units, what those leave to others would be whole ones, so
// filling gains; where tiles are split by heads, other choices of them are as good for the end, and read device memory less. The factors
// come from measurements of each way in 35 to 100 masks. The choice depends on the device, and not on what is left free.
template <int kQueries>
__device__ inline int choose_way(const BwdRowParams& p, const SortedTiles& sorted, const Cuts& cuts) {
  __shared__ uint2 found[kShorterHalf];
  __shared__ unsigned ends[4];
  const int warp = threadIdx.x / 32;
  static_assert(kShorterHalf <= kRowThreads / 32, "a warp for each");
  if (warp < kShorterHalf) {
    const uint2 end = end_of_units(p, list_of(p, warp, sorted, cuts), sorted, {});
    if (threadIdx.x % 32 == 0) found[warp] = end;
  }
  __syncthreads();
  const float whole = static_cast<float>(found[0].x), longest = static_cast<float>(sorted[0].y + kUnitTime);
  const float shorter = fmaxf(1.08f * static_cast<float>(found[0].y) / static_cast<float>(p.processors), longest);
  // Wide steps were measured in fewer masks; with the same factor one whose halves end 6% sooner stayed whole.
  constexpr float kWorth = kQueries == kQueryBlock ? 1.06f : 1.04f;
  float best = whole > kWorth * shorter ? 1.03f * shorter : whole;
  int way = best < whole ? kShorterHalf : kWhole;
  for (int i = 1; i < kShorterHalf; ++i) {
    const float end = (i < kLongestByHeads ? 1.02f : way == kShorterHalf ? 1.06f : 1.2f) * static_cast<float>(found[i].x);
    if (end >= best) continue;
    best = end;
    way = i;
  }
  const bool by_heads = way >= kLongestByHeads;
  auto tried = [&](int i) { return i == 0 ? way : by_heads ? kMiddleHalf + i - 1 : static_cast<int>(kCutFilled); };
  const int tries = by_heads ? 4 : kFewParts * kShortest * p.heads_kv <= p.processors ? 2 : 1;
  if (warp < tries) {
    const unsigned end = end_of_units(p, list_of(p, tried(warp), sorted, cuts), sorted, Late::of(p)).x;
    if (threadIdx.x % 32 == 0) ends[warp] = end;
  }
  __syncthreads();
  best = static_cast<float>(ends[0]);
  int chosen = way;
  for (int i = 1; i < tries; ++i) {
    const float end = (tried(i) == kCutFilled ? 1.02f : tried(i) == kMiddleHalf ? 1.f : 1.01f) * static_cast<float>(ends[i]);
    if (end >= best) continue;
    best = end;
    chosen = tried(i);
  }
  return chosen;
}

}  // namespace magi
