// SPDX-License-Identifier: Apache-2.0
// Lists the units of short documents anew, in the way that bwd_ways_choice.cuh chooses: see bwd_split.cuh.
#pragma once

#include "bwd_complete.cuh"
#include "bwd_needed.cuh"
#include "bwd_ways_choice.cuh"

namespace magi {

// Writes the list: tile, kv head, fourth word of each unit; behind it tile, kv head, number of parts of each slot. And how many units
// there are of each part of a tile.
__device__ inline void write_list(const BwdRowParams& p, const UnitList& list, const SortedTiles& sorted) {
  const int units = list.units(p), slots = list.splits() * p.heads_kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 32 * warp; base < units; base += kRowThreads) {
    const ListedUnit u = list.unit(p, base + lane, sorted);
    if (base + lane >= units) continue;
    const int row = list.row(p, base + lane, u, sorted), tile = sorted[u.tile].x;
    const int walk = static_cast<int>(row < p.places ? Way::kEarly : Way::kForwards) << kWayBit;
    const int word = u.part | walk | u.slot << kSlotBit;
    p.units[row] = make_int4(tile, u.head, word, 0);
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
// A template, because several translation units have it.
template <int kThreads, int kQueries>
__global__ void __launch_bounds__(kThreads) bwd_list(const BwdRowParams p) {
  static_assert(kThreads == kRowThreads);
  __shared__ int2 sorted[kMaxListed];
  const bool is_made = begin_call(p);
  start_next_kernel();
  if (is_made || !bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  sort_tiles<kQueries>(p, sorted);
  __shared__ Cuts cuts;
  find_cuts<kQueries>(p, sorted, cuts);
  write_list(p, list_of(p, choose_way<kQueries>(p, sorted, cuts), sorted, cuts), sorted);
  begin_counts(p);
  if (threadIdx.x == kSplitWord || threadIdx.x == kUnitsWord) p.workspace[threadIdx.x] = p.list[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.workspace + kListedWord, 1);
  if (!p.keeps_list) return;
  find_needed<kQueries>(p, p.list[kUnitsWord], p.completion.expected);
  order_blocks(p, p.completion.expected);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.list + kMadeWord, 1);
}

}  // namespace magi
