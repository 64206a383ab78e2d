// SPDX-License-Identifier: Apache-2.0
// Lists the work tiles of short documents anew, in the way that bwd/schedule/select_schedule.cuh
// chooses: see bwd/schedule/split.cuh.
#pragma once

#include "ffa/sm90/bwd/rows/completion.cuh"
#include "ffa/sm90/bwd/schedule/needed.cuh"
#include "ffa/sm90/bwd/schedule/select_schedule.cuh"

namespace magi {

// Writes the list: tile, kv head, fourth word of each work tile; behind it tile, kv head, number of
// parts of each partial. And how many work tiles there are of each part of a tile.
__device__ inline void write_work_list(const BwdRowParams& p, const WorkList& list,
                                       const SortedTiles& sorted) {
  const int work_tiles = list.work_tiles(p), slots = list.splits() * p.heads_kv,
            warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 32 * warp; base < work_tiles; base += kRowThreads) {
    const ListedWorkTile u = list.work_tile(p, base + lane, sorted);
    if (base + lane >= work_tiles) continue;
    const int row = list.row(p, base + lane, u, sorted), tile = sorted[u.tile].x;
    const int traversal =
        static_cast<int>(row < p.num_ctas ? Traversal::kWrap : Traversal::kAscending)
        << kTraversalBit;
    const int word = u.part | traversal | u.slot << kPartialBit;
    p.work_tiles[row] = make_int4(tile, u.head, word, 0);
    for (int part = 0; part < kListedHeadSplits; ++part)
      p.first_left[(tile * p.heads_kv + u.head) * kListedHeadSplits + part] = is_cut(word) ? 2 : 1;
  }
  for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
    const int2 tile = list.split_tile(slot / p.heads_kv);
    p.work_tiles[work_tiles + slot] = make_int4(sorted[tile.x].x, slot % p.heads_kv, tile.y, 0);
  }
  if (threadIdx.x == 0) {
    p.list[kSplitWord] = slots;
    p.list[kNumWorkTilesWord] = work_tiles;
  }
  __syncthreads();
}

__device__ inline void begin_counts(const BwdRowParams& p) {
  for (int i = threadIdx.x; i < kListedHeadSplits * p.num_tiles * p.heads_kv; i += kRowThreads)
    p.completion.left[i] = p.first_left[i];
}

// Counters and flags of a call as they are at the start; whether the list is there.
__device__ inline bool begin_call(const BwdRowParams& p) {
  const bool is_made = p.keeps_work_list && load_acquire(p.list + kMadeWord) != 0;
  for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads)
    p.workspace[i] = !is_made ? 0
                     : i == kSplitWord || i == kNumWorkTilesWord
                         ? p.list[i]
                         : i == kWorkListWord || i == kInOrderWord;
  for (int i = threadIdx.x; i < p.num_m_blocks * p.heads_kv; i += kRowThreads)
    p.completion.prepared[i] = 0;
  if (is_made) begin_counts(p);
  __threadfence();
  __syncthreads();
  return is_made;
}

// One CTA of kRowThreads, beside the kernel that prepares the rest. If the caller keeps lists, only
// the first call of its kind makes one. A template, because several translation work tiles have it.
template <int kThreads, int kBlockM>
__global__ void __launch_bounds__(kThreads) bwd_work_list(const BwdRowParams p) {
  static_assert(kThreads == kRowThreads);
  __shared__ int2 sorted[kMaxWorkList];
  const bool is_made = begin_call(p);
  start_next_kernel();
  if (is_made || !bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  sort_tiles<kBlockM>(p, sorted);
  __shared__ Cuts cuts;
  find_cuts<kBlockM>(p, sorted, cuts);
  write_work_list(p, list_of(p, choose_way<kBlockM>(p, sorted, cuts), sorted, cuts), sorted);
  begin_counts(p);
  if (threadIdx.x == kSplitWord || threadIdx.x == kNumWorkTilesWord)
    p.workspace[threadIdx.x] = p.list[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.workspace + kWorkListWord, 1);
  if (!p.keeps_work_list) return;
  find_needed<kBlockM>(p, p.list[kNumWorkTilesWord], p.completion.expected);
  order_blocks(p, p.completion.expected);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.list + kMadeWord, 1);
}

}  // namespace magi
