// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of keys add to dq, where that is asked for: then dq is the same bits on
// every run.
//
// Each block of queries counts what has been added to it. A tile waits until those have added that
// come before it: that number is its semaphore target. The order is fixed beforehand, by the time
// at which a tile should get to the block, so that waits are short: the start of its work tile, by
// a simulation of how work tiles are scheduled, and the block's place in its walk.
//
// The simulation counts with what makes work tiles late. The first begin together and
// mostly with the same blocks, so each has to wait for those before it: about a step. And in L2
// groups of heads behind the first work tiles begin when work tiles of the one before end, so those
// have a table of semaphore targets of their own. Both matter where work tiles walk in both
// directions: who is expected before another, and late, is waited for by all that meet. Where a
// block is few steps, because few query heads share keys, no simulation is near enough: there all
// walk backwards, one behind the other, which costs hits in L2 where query heads are many
// (docs/log/ffa_backward_turns.md). With one query head to each kv head the start counts, too,
// when all wait one behind the other at the last block: L2 groups have twice as many heads
// (bwd_heads_per_l2_group), and where there is only one and L2 keeps what work tiles walk, these
// begin some blocks apart and come round (begin_apart).
//
// Some uneven tiles may be split by query heads (bwd/schedule/split.cuh): each part is a work
// tile with a start of its own, and goes through its blocks as much faster. There are semaphore
// targets for each kind of part then, and a whole work tile has all of its head's.
//
// Nobody waits in a circle. Expected times grow along every walk, so of all that has not happened
// yet what is expected first has nothing to wait for but a CTA. It gets one: work tiles are taken
// up in the order of the simulation, by CTAs that have added all of their last one and not before,
// and what ended there before it starts has ended here, as have the L2 groups before. (Were a work
// tile taken earlier, it could be the one that the CTA's last work tile waits for; where a CTA
// starts late because other kernels hold its multiprocessor, this happens.) The simulation has no
// more work tiles at a time than there are CTAs. All CTAs are taken to be resident sooner or later,
// one on each multiprocessor: other kernels may delay that, but none that holds a multiprocessor
// may wait for this one, and no second kernel in deterministic order may run beside it on another
// stream: each could hold what the other waits for
// (`native/stream_order.py` sees to that).
//
// Where work tiles walk head by head, a block is expected at another time for each head, but
// semaphore targets are to be the same for all: there, and where tiles are too many to compare,
// ranks are cut into waves of no more work tiles than there are CTAs. The order is that of the
// waves, and within one that of the expected time without the heads. Whoever waits for an earlier
// wave waits for work tiles that were taken up before and will end; all work tiles of a wave get a
// CTA, as the CTAs that have none of it are at earlier ones.
//
// Where a tile visits a block in more than one segment there is no such time either: then the order
// is that of the tiles.
//
// Where a block has one contribution only there is nothing to sum: if that is asked for, the main
// kernel rounds its dq and writes it, and the last kernel never sees it.
//
// With MAGI_DQ_FIRST_WRITER there is no order: the first writer stores, and nobody waits but for
// that store to be complete. Work tiles are scheduled as above all the same, and additions counted,
// for the last kernel.
//
// All of that depends on the plan and the sizes of a call alone, so the first call of its kind
// makes it, and the caller may keep it for the others
// (`list` in magi/abi.h).
//
// Which order fits a plan and when work tiles are expected to start is in
// bwd/schedule/simulate.cuh, how they walk in bwd/schedule/plan_reader.cuh, who waits in
// bwd/producer/dq_store.cuh. tests/kernels/semaphore_model.py has the same rules in Python, with an
// adversary; test_semaphores_on_cpu.py shows that these files keep to them.
#pragma once

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"

namespace magi {

// When the work tile of a tile that starts at `start` is expected at a block, in ticks, from bit 16
// on, and how often it visits it.
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

// One thread: so many visits add to a block, the last of them expected `last`. Unless a single one
// writes dq itself the last kernel has to.
__device__ __forceinline__ void write_contributions(const BwdRowParams& p, int block, int count,
                                                    int last) {
  const bool is_direct = p.stores_direct && count == 1;
  p.contributions_of_block[block] = make_int2(count, last);
  p.direct_dq_store[block] = is_direct ? kDirectStoreBit : 0;
  if (!is_direct) p.summed[1 + atomicAdd(p.summed, 1)] = block;
}

// A whole CTA: the semaphore targets at one block of queries of all work tiles of an L2 group that
// starts as `table` says. Work tiles of the same heads and pass are compared. And how many there
// are, which is the same for all heads, and when the last is expected, which is told of the first.
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

// The same without the semaphore targets: only how many visits there are, and when the last is
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
