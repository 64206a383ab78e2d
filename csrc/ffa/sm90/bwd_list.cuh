// SPDX-License-Identifier: Apache-2.0
// Lists the units of short documents anew, and chooses which are split so that all multiprocessors end together: see bwd_split.cuh.
//
// What runs at the same time should read the same blocks, or Q, dO and dq come from device memory several times. A tile with the
// end of one document and the start of the next is best cut there: then each part runs beside the other tiles of its document.
// Some heads of the longest tiles run beside nothing of their kind, which costs some 20%; still they pay where one tile would be
// at work when all others are through. Heads of the shorter tiles fill the gaps.
#pragma once

#include "bwd_complete.cuh"
#include "bwd_needed.cuh"
#include "bwd_ways.cuh"

namespace magi {

constexpr int kSlotTime = 1;  // to add up the parts of a split unit, in the units of bwd_ways.cuh
// Where each multiprocessor has two long units, what those that begin late leave to others would be whole units. So as many tiles are cut
// and of the shortest split by heads, if that is to gain 2%.
constexpr int kCut = 2, kShortest = 2;

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
template <int kPlaces, typename List>
__device__ uint2 end_on_places(const BwdRowParams& p, const List& list, const SortedTiles& sorted, Late late) {
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

template <typename List>
__device__ uint2 end_of_units(const BwdRowParams& p, const List& list, const SortedTiles& sorted, Late late = {}) {
  constexpr int kFew = 5;  // each more takes longer
  return p.processors <= 32 * kFew ? end_on_places<kFew>(p, list, sorted, late) : end_on_places<kMaxWave / 32>(p, list, sorted, late);
}

// Writes the list: tile, kv head, fourth word of each unit; behind it tile, kv head, number of parts of each slot. And how many units
// there are of each part of a tile.
template <typename List>
__device__ void write_list(const BwdRowParams& p, const List& list, const SortedTiles& sorted) {
  const int units = list.units(p), slots = list.splits() * p.heads_kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 32 * warp; base < units; base += kRowThreads) {
    const ListedUnit u = list.unit(p, base + lane, sorted);
    const int walk = static_cast<int>(base + lane < p.places ? Way::kEarly : Way::kForwards) << kWayBit;
    const int word = u.part | walk | u.slot << kSlotBit;
    if (base + lane >= units) continue;
    const int tile = sorted[u.tile].x;
    p.units[base + lane] = make_int4(tile, u.head, word, 0);
    for (int part = 0; part < kSplitParts; ++part) p.first_left[(tile * p.heads_kv + u.head) * kSplitParts + part] = is_cut(word) ? 2 : 1;
  }
  for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
    const int2 tile = list.split_tile(slot / p.heads_kv);
    p.units[units + slot] = make_int4(sorted[tile.x].x, slot % p.heads_kv, tile.y, 0);
  }
  if (threadIdx.x == 0) {
    p.list[kSplitWord] = slots;
    p.list[kUnitsWord] = units;
  }
  __syncthreads();
}

__device__ inline void begin_counts(const BwdRowParams& p) {
  for (int i = threadIdx.x; i < kSplitParts * p.num_tiles * p.heads_kv; i += kRowThreads) p.completion.left[i] = p.first_left[i];
}

// Counters and flags of a call as they are at the start; whether the list is there.
__device__ inline bool begin_call(const BwdRowParams& p) {
  const bool is_made = p.keeps_list && load_acquire(p.list + kMadeWord) != 0;
  for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads)
    p.workspace[i] = !is_made ? 0 : i == kSplitWord || i == kUnitsWord ? p.list[i] : i == kListedWord || i == kInOrderWord;
  for (int i = threadIdx.x; i < p.query_blocks * p.heads_kv; i += kRowThreads) p.completion.prepared[i] = 0;
  if (is_made) begin_counts(p);
  __threadfence();
  __syncthreads();
  return is_made;
}

// One CTA of kRowThreads, beside the kernel that prepares the rest. If the caller keeps lists, only the first call of its kind makes one.
// A warp tries each way: nothing split; a tile or two cut; one
// to four of the longest by heads. Of the shorter half by heads it is known that those end about 8% after all multiprocessors would
// if they shared the work evenly, and not before the longest tile. The choice depends on the device, and not on what is left free.
// A template, because several translation units have it.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_list(const BwdRowParams p) {
  constexpr int kWays = 7;
  static_assert(kThreads == kRowThreads && kWays <= kThreads / 32, "a warp for each");
  __shared__ int2 sorted[kMaxListed];
  __shared__ uint2 found[kWays];
  __shared__ unsigned ends[2];
  const bool is_made = begin_call(p);
  start_next_kernel();
  if (is_made || !bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  sort_tiles(p, sorted);
  __shared__ Cuts cuts;
  find_cuts(p, sorted, cuts);
  const int warp = threadIdx.x / 32;
  if (warp < kWays) {
    const uint2 end = warp < 3 ? end_of_units(p, CutsList(p, warp, 0, sorted, cuts), sorted) : end_of_units(p, HeadsList(p, 0, warp - 2, sorted), sorted);
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
  if (way < 3) {
    const int cut[2] = {way, kCut}, shortest[2] = {0, kShortest};
    if (warp < 2) {
      const uint2 end = end_of_units(p, CutsList(p, cut[warp], shortest[warp], sorted, cuts), sorted, Late::of(p));
      if (threadIdx.x % 32 == 0) ends[warp] = end.x;
    }
    __syncthreads();
    const bool fills = 1.02f * static_cast<float>(ends[1]) < static_cast<float>(ends[0]);
    write_list(p, CutsList(p, cut[fills], shortest[fills], sorted, cuts), sorted);
  } else {
    write_list(p, way < kWays ? HeadsList(p, 0, way - 2, sorted) : HeadsList(p, p.num_tiles / 2, p.num_tiles - p.num_tiles / 2, sorted), sorted);
  }
  begin_counts(p);
  if (threadIdx.x == kSplitWord || threadIdx.x == kUnitsWord) p.workspace[threadIdx.x] = p.list[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.workspace + kListedWord, 1);
  if (!p.keeps_list) return;
  find_needed(p, p.list[kUnitsWord], p.completion.expected);
  order_blocks(p, p.completion.expected);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.list + kMadeWord, 1);
}

}  // namespace magi
