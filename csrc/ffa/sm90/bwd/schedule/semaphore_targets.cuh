// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of keys add to dq, in deterministic mode: dq is then the same bits on
// every run.
//
// Each block of queries counts the additions made to it. A tile waits until the count is its
// semaphore target: the number of additions that come before its own. The order is fixed before the
// main kernel runs. It follows the time at which a tile should reach the block, so that waits are
// short: the simulated start of its work tile, plus the block's place in its traversal.
//
// What the simulation takes into account:
// * Start-up lag. The first work tiles start together and mostly at the same blocks, so each waits
//   for those before it, about a step.
// * L2 groups of heads. Work tiles of a later group start when some of the group before end, so
//   later groups have a table of semaphore targets of their own.
// * Splits. Some uneven tiles may be split by query heads (bwd/schedule/split.cuh). Each part is a
//   work tile with a start of its own, and takes less time for a block. There are semaphore targets
//   for each kind of part; a whole work tile has those of all parts of its head.
// Lag and groups matter where work tiles run in both directions: one that is expected early and
// comes late is waited for by all that meet it.
//
// Where few query heads share keys, a block takes few steps and no simulation is precise enough.
// There all work tiles descend, one behind the other, which costs L2 hits where query heads are
// many (docs/log/ffa_backward_turns.md). With one query head to each kv head, starts matter even
// so, because all wait at the last block. Then L2 groups have twice as many heads
// (bwd_heads_per_l2_group), and where there is a single group, and L2 keeps what it reads, work
// tiles start staggered, some blocks apart, and wrap around (begin_apart).
//
// Why no work tiles wait for each other in a circle:
// 1. Expected times grow along each traversal. So of all additions still to come, the one expected
//    first waits for no other; it needs only a CTA.
// 2. It gets one. Work tiles are taken in the simulation's order, by CTAs that have finished all
//    additions of their last one. The simulation runs at most one work tile for each CTA at a time,
//    so whatever ended there before this start has ended here, as have earlier L2 groups.
// 3. No CTA takes a work tile earlier than that: the new one could be what the CTA's own last work
//    tile waits for. This happens where other kernels hold an SM and a CTA starts late.
// 4. All CTAs become resident sooner or later, one on each SM. Other kernels may delay that, but
//    none that holds an SM may wait for this one. Nor may a second kernel in deterministic mode run
//    on another stream at the same time: each could hold what the other waits for
//    (`native/stream_order.py` prevents it).
//
// Waves. Where a work tile traverses its blocks head by head, it reaches a block at another time
// for each head, but all heads share their semaphore targets. There, and where tiles are too many
// to compare, order indices are divided into waves of no more work tiles than there are CTAs. Waves
// come one after the other, and within a wave the order is by expected time, heads left out.
// Whoever waits for an earlier wave waits for work tiles that were taken before and will end. All
// work tiles of a wave get a CTA, because CTAs that have none of it are still in earlier waves.
//
// Where a tile contributes to a block in more than one segment there is no such time either: then
// the order is that of the tiles.
//
// Where a block has a single contribution there is nothing to sum. If that is asked for, the main
// kernel rounds its dq and writes it, and the last kernel never sees it.
//
// With MAGI_DQ_FIRST_WRITER there is no order: the first writer stores, and others wait only until
// that store is complete. Work tiles are still scheduled as above, and contributions counted, for
// the last kernel.
//
// All of that depends only on the plan and the sizes of a call, so the first call of its kind makes
// it, and the caller may keep it for the others (`order` in magi/abi.h).
//
// See bwd/schedule/simulate.cuh for which order fits a plan and when work tiles are expected to
// start, bwd/schedule/plan_reader.cuh for traversals, bwd/producer/dq_store.cuh for the waits.
// tests/kernels/schedule/test_semaphore_order.py runs these files on the CPU, and
// magi_waits_check shows that nobody waits for ever.
#pragma once

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"

namespace magi {

// From bit 16 on, when the work tile of a tile that starts at `start` is expected at a block, in
// ticks; below, how many contributions it makes to the block.
template <int kBlockM>
__device__ __forceinline__ uint64_t contributions_of(const BwdRowParams& p, int tile, int order_idx,
                                                     int start, int block) {
  const int2 segments = segments_of_tile(p.plan, tile);
  const int flags = p.order[0];
  const bool by_order = !(flags & (kTimed | kInWaves));
  const int ticks =
      order_idx >= p.split_begin && order_idx < p.split_end ? p.split_ticks : kTicks;  // of a block
  uint64_t time = by_order ? 0 : start;
  uint32_t count = 0;
  for (int i = 0; i < segments.y; ++i) {
    const int2 blocks = segment_blocks<kBlockM>(p.plan, segments.x + i);
    if (block < blocks.x || block >= blocks.y) {
      time += by_order ? 0 : flags & kByHead ? 1ull << 36 : ticks * (blocks.y - blocks.x);
      continue;
    }
    ++count;
    if (by_order) continue;
    time += ticks * place_in_traversal(blocks, ordered_traversal(flags, order_idx >= p.wave),
                                       ordered_shift(p.order, order_idx, p.wave), block);
    break;
  }
  return time << 16 | min(count, 0xffffu);
}

// One thread: a block has `count` contributions, the last of them expected at `last`. The last
// kernel writes its dq, unless a single contribution does.
__device__ __forceinline__ void write_contributions(const BwdRowParams& p, int block, int count,
                                                    int last) {
  const bool is_direct = p.stores_direct && count == 1;
  p.contributions_of_block[block] = make_int2(count, last);
  p.direct_dq_store[block] = is_direct ? kDirectStoreBit : 0;
  if (!is_direct) p.summed[1 + atomicAdd(p.summed, 1)] = block;
}

// A whole CTA: the semaphore targets at one block of queries of all work tiles of an L2 group that
// starts as `table` says. Work tiles of the same heads and pass are compared. Also the number of
// contributions, which is the same for all heads, and when the last is expected, by the first
// heads.
template <int kThreads, int kBlockM>
__device__ void assign_semaphore_targets(const BwdRowParams& p, int block, int table) {
  __shared__ uint64_t contributions[kMaxTimed];
  __shared__ int before[kMaxTimed];
  __shared__ int last;
  static_assert(kMaxWave <= kMaxTimed, "a wave is compared");
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  const int flags = p.order[0], per_tile = p.work_tiles_per_tile,
            work_tiles = p.num_tiles * per_tile;
  const int32_t* starts = p.order + 1 + p.num_tiles + table * work_tiles;
  int32_t* targets = p.semaphore_targets +
                     static_cast<int64_t>(block) * p.target_tables * work_tiles +
                     table * work_tiles;
  const int tiles = flags & kTimed     ? p.num_tiles
                    : flags & kInWaves ? p.wave
                                       : kMaxWave;     // that are compared
  const int kinds = min(per_tile, kMaxTimed / tiles);  // at a time
  if (threadIdx.x == 0) last = 0;
  for (int kind = 0; kind < per_tile; kind += kinds) {
    const int width = min(kinds, per_tile - kind);
    for (int i = threadIdx.x; i < width; i += kThreads) before[i] = 0;
    for (int first = 0; first < p.num_tiles; first += tiles) {
      const int here = min(tiles, p.num_tiles - first) * width;
      for (int i = threadIdx.x; i < here; i += kThreads) {
        const int order_idx = first + i / width;
        contributions[i] = contributions_of<kBlockM>(
            p, order[order_idx], order_idx, starts[order_idx * per_tile + kind + i % width], block);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < here; i += kThreads) {
        const uint64_t mine = contributions[i];
        if ((mine & 0xffff) == 0) continue;
        int target = before[i % width];
        for (int j = i % width; j < here; j += width)
          if (contributions[j] >> 16 < mine >> 16 ||
              (contributions[j] >> 16 == mine >> 16 && j < i))
            target += contributions[j] & 0xffff;
        targets[order[first + i / width] * per_tile + kind + i % width] = target;
        if (kind + i % width == 0)
          atomicMax(&last, min(first, 0x7ff) << 20 |
                               static_cast<int>(min(mine >> 16, static_cast<uint64_t>(0xfffff))));
      }
      __syncthreads();
      for (int i = threadIdx.x; i < width; i += kThreads)
        for (int j = i; j < here; j += width) before[i] += contributions[j] & 0xffff;
      __syncthreads();
    }
    if (table == 0 && kind == 0 && threadIdx.x == 0) write_contributions(p, block, before[0], last);
  }
}

// The same without semaphore targets: only the number of contributions, and when the last is
// expected.
template <int kThreads, int kBlockM>
__device__ void sum_contributions(const BwdRowParams& p, int block) {
  __shared__ int count, last;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  const int32_t* starts = p.order + 1 + p.num_tiles;
  if (threadIdx.x == 0) count = last = 0;
  __syncthreads();
  for (int order_idx = threadIdx.x; order_idx < p.num_tiles; order_idx += kThreads) {
    const uint64_t mine = contributions_of<kBlockM>(
        p, order[order_idx], order_idx, starts[order_idx * p.work_tiles_per_tile], block);
    if ((mine & 0xffff) == 0) continue;
    atomicAdd(&count, static_cast<int>(mine & 0xffff));
    atomicMax(&last, static_cast<int>(min(mine >> 16, static_cast<uint64_t>(0xfffff))));
  }
  __syncthreads();
  if (threadIdx.x == 0) write_contributions(p, block, count, last);
}

}  // namespace magi
