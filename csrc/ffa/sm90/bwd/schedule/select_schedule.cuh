// SPDX-License-Identifier: Apache-2.0
// Chooses in which way the work tiles of short documents are listed, so that all multiprocessors
// end together: by simulations of when the last work tile ends.
//
// What runs at the same time should read the same blocks, or Q, dO and dq come from device memory
// several times. A tile with the end of one document and the start of the next is best cut there:
// then each part runs beside the other tiles of its document. Some heads of the longest tiles run
// beside nothing of their kind, which costs some 20%; still they pay where one tile would be at
// work when all others are through. Heads of the shorter tiles fill the gaps.
#pragma once

#include "ffa/sm90/bwd/schedule/candidates.cuh"

namespace magi {

constexpr int kSlotTime = 1;  // to add up the parts of a split work tile, in the work tiles of
                              // bwd/schedule/candidates.cuh
// Multiprocessors at least, for each tile and kv head that fills: with 44 kv heads of 4 query heads
// it took 1.2 times as long.
constexpr int kFewParts = 4;

// How many multiprocessors begin late, as they prepare rows until then
// (bwd/rows/preprocess_work_list.cuh), and when.
struct Late {
  int processors = 0;
  unsigned time = 0;

  __device__ static Late of(const BwdRowParams& p) {
    const int processors = late_processors(p.processors);
    return {processors, static_cast<unsigned>(
                            min(kBlockTime * p.num_m_blocks * p.heads_q / processors, kLongTime))};
  }
  static constexpr int64_t kBlockTime = 4, kLongTime = 1 << 24;  // of a block of a head
};

// When the last work tile of a list ends, where each goes to the multiprocessor that is free first,
// and the parts are added up; and what all of them take. Some multiprocessors may begin late. Lane
// l keeps when multiprocessors l, l + 32, ... will be free.
template <int kCtaSlots>
__device__ uint2 end_on_ctas(const BwdRowParams& p, const WorkList& list, const SortedTiles& sorted,
                             Late late) {
  const int lane = threadIdx.x % 32, work_tiles = list.work_tiles(p),
            num_ctas = min(p.processors, work_tiles), at_once = max(num_ctas - late.processors, 0);
  unsigned ends[kCtaSlots], last = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < kCtaSlots; ++i) {
    const unsigned time = list.work_tile(p, lane + 32 * i, sorted).time;
    ends[i] = lane + 32 * i < at_once ? time : lane + 32 * i < num_ctas ? late.time : ~0u;
    if (lane + 32 * i >= at_once) continue;
    last = max(last, time);
    sum += time;
  }
  for (int base = at_once; base < work_tiles; base += 32) {
    const unsigned found = list.work_tile(p, base + lane, sorted).time,
                   time = base + lane < work_tiles ? found : 0;
    sum += time;
    const int left = min(32, work_tiles - base);
    for (int j = 0; j < left; ++j) {
      unsigned mine = ~0u;
#pragma unroll
      for (int i = 0; i < kCtaSlots; ++i) mine = min(mine, ends[i]);
      const unsigned first = __reduce_min_sync(0xffffffff, mine),
                     end = first + __shfl_sync(0xffffffff, time, j);
      bool taken = lane != __ffs(__ballot_sync(0xffffffff, mine == first)) - 1;
#pragma unroll
      for (int i = 0; i < kCtaSlots; ++i) {
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

__device__ inline uint2 end_of_work_tiles(const BwdRowParams& p, const WorkList& list,
                                          const SortedTiles& sorted, Late late) {
  constexpr int kFew = 5;  // each more takes longer
  return p.processors <= 32 * kFew ? end_on_ctas<kFew>(p, list, sorted, late)
                                   : end_on_ctas<kMaxWave / 32>(p, list, sorted, late);
}

// Which way to list work tiles. A warp tries each of the first seven. Of the shorter half by heads
// it is known that those end about 8% after all multiprocessors would if they shared the work
// evenly, and not before the longest tile. What is chosen is then tried again beside others, now as
// some multiprocessors begin late: where each has two long work tiles, what those leave to others
// would be whole ones, so filling gains; where tiles are split by heads, other choices of them are
// as good for the end, and read device memory less. The factors come from measurements of each way
// in 35 to 100 masks. The choice depends on the device, and not on what is left free.
template <int kBlockM>
__device__ inline int choose_way(const BwdRowParams& p, const SortedTiles& sorted,
                                 const Cuts& cuts) {
  __shared__ uint2 found[kShorterHalf];
  __shared__ unsigned ends[4];
  const int warp = threadIdx.x / 32;
  static_assert(kShorterHalf <= kRowThreads / 32, "a warp for each");
  if (warp < kShorterHalf) {
    const uint2 end = end_of_work_tiles(p, list_of(p, warp, sorted, cuts), sorted, {});
    if (threadIdx.x % 32 == 0) found[warp] = end;
  }
  __syncthreads();
  const float whole = static_cast<float>(found[0].x),
              longest = static_cast<float>(sorted[0].y + kWorkTileTime);
  const float shorter =
      fmaxf(1.08f * static_cast<float>(found[0].y) / static_cast<float>(p.processors), longest);
  // Wide steps were measured in fewer masks; with the same factor one whose halves end 6% sooner
  // stayed whole.
  constexpr float kWorth = kBlockM == kBlockM64 ? 1.06f : 1.04f;
  float best = whole > kWorth * shorter ? 1.03f * shorter : whole;
  int traversal = best < whole ? kShorterHalf : kWhole;
  for (int i = 1; i < kShorterHalf; ++i) {
    const float end = (i < kLongestByHeads         ? 1.02f
                       : traversal == kShorterHalf ? 1.06f
                                                   : 1.2f) *
                      static_cast<float>(found[i].x);
    if (end >= best) continue;
    best = end;
    traversal = i;
  }
  const bool by_heads = traversal >= kLongestByHeads;
  auto tried = [&](int i) {
    return i == 0 ? traversal : by_heads ? kMiddleHalf + i - 1 : static_cast<int>(kCutFilled);
  };
  const int tries = by_heads ? 4 : kFewParts * kShortest * p.heads_kv <= p.processors ? 2 : 1;
  if (warp < tries) {
    const unsigned end =
        end_of_work_tiles(p, list_of(p, tried(warp), sorted, cuts), sorted, Late::of(p)).x;
    if (threadIdx.x % 32 == 0) ends[warp] = end;
  }
  __syncthreads();
  best = static_cast<float>(ends[0]);
  int chosen = traversal;
  for (int i = 1; i < tries; ++i) {
    const float end = (tried(i) == kCutFilled    ? 1.02f
                       : tried(i) == kMiddleHalf ? 1.f
                                                 : 1.01f) *
                      static_cast<float>(ends[i]);
    if (end >= best) continue;
    best = end;
    chosen = tried(i);
  }
  return chosen;
}

}  // namespace magi
