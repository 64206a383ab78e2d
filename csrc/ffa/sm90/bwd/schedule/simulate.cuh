// SPDX-License-Identifier: Apache-2.0
// Which semaphore order fits a plan (bwd/schedule/semaphore_targets.cuh), and when work tiles are
// expected to start: one warp simulates the schedule ahead of the backward. Tests compile this for
// the CPU, so `P`, of which it takes sizes, is BwdRowParams only on the GPU.
#pragma once

#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"

namespace magi {

// Where L2 keeps most of Q, dO and dq (so many bytes were timed): how many query heads of a work
// tile are few however few tiles are in work, and up to how many work tiles may start staggered.
constexpr int64_t kMostKept = 64 << 20;
constexpr int64_t walked_bytes(int64_t heads_q, int64_t total_q, int dim_blocks) {
  return heads_q * total_q * 8 * 64 * dim_blocks;
}
constexpr int few_if_kept(int dim_blocks) {
  return dim_blocks == 1 ? kFewHeads : dim_blocks == 2 ? 1 : 0;
}
constexpr int most_apart(int dim_blocks) { return dim_blocks == 1 ? 2 : 1; }

// An L2 group of heads, in ticks of one head.
struct ScheduleModel {
  int tiles, per_tile;  // work tiles of each tile: one for each head unit, or for each part of
                        // those that are split
  int split_begin, split_end, parts,
      split_ticks;  // order indices that are split, into how many parts, what a block of one takes
  int num_ctas;
  int late;  // by which work tiles of a tile that begin first are behind those of the tile before
  int ends_after;   // in addition to its blocks, what a work tile takes
  int scale;        // by which starts are multiplied
  bool has_second;  // another L2 group behind it has starts of its own
};

// Whether work tiles that all descend start staggered, some blocks apart. Bands are apart anyway.
// With several L2 groups, or with more heads in a work tile, it lost where it was timed: work tiles
// are all over Q, dO and dq then, and L2 has to keep more of them.
template <typename P>
__device__ __forceinline__ bool begin_apart(const P& p, int flags, int bands) {
  return bands == 0 && p.splits_per_split_tile == 1 && flags & kTimed &&
         p.heads_per_split <= most_apart(p.dim_blocks) && p.heads_per_l2_group == p.heads_kv &&
         p.heads_per_split * walked_bytes(p.heads_q, p.total_q, p.dim_blocks) <= kMostKept;
}

// Whether so many query heads of a work tile are few: their blocks are short steps.
template <typename P>
__device__ __forceinline__ bool has_few_heads(const P& p) {
  if (p.heads_per_split <= kFewHeads && p.wave >= kManyTiles * p.heads_per_split) return true;
  return p.heads_per_split <= few_if_kept(p.dim_blocks) &&
         walked_bytes(p.heads_q, p.total_q, p.dim_blocks) <= kMostKept;
}

// The flags of a plan with so many segments that are bands, and others.
template <typename P>
__device__ __forceinline__ int flags_of(const P& p, int bands, int others, bool contributes_twice) {
  // Blocks of one head have an expected time. Waves are of whole tiles.
  const bool by_head =
      bands > others && (p.first_writer || p.heads_per_split > 1) && p.splits_per_split_tile == 1;
  if (contributes_twice) return by_head ? kByHead : 0;
  const int flags =
      (by_head ? kByHead : 0) | (!by_head && p.num_tiles <= kMaxTimed ? kTimed : kInWaves);
  // Among plans in order, only those with tiles ordered by document have work tiles.
  const bool is_one_way = !p.first_writer && !by_head && has_few_heads(p);
  if (has_work_tiles(p.plan) || is_one_way)
    return flags | kAllDescending | (is_one_way && begin_apart(p, flags, bands) ? kApart : 0);
  return flags | (!p.first_writer && !by_head && p.target_tables == 2 ? kLaterTargets : 0);
}

// How the work tiles of the first L2 group are scheduled, and those of the second behind it. Where
// there are several groups, each has more work tiles than there are CTAs.
template <typename P>
__device__ __forceinline__ ScheduleModel schedule_model_of(const P& p, int flags) {
  // Start-up lag, in half steps: the work tiles that start first meet at the same blocks, and each
  // waits for the one before. It is twice what an addition takes, because expecting a work tile too
  // late costs less than expecting it too early. To begin and end a work tile takes two steps and a
  // half.
  const int late_halves = p.dim_blocks == 1 ? 5 : p.dim_blocks == 2 ? 3 : 2;
  const bool is_one_way = flags & (kByHead | kAllDescending);
  const int late = is_one_way ? 0 : kTicks * late_halves / (2 * p.heads_per_split);
  const int ends_after = is_one_way && !(flags & kApart) ? 0 : 5 * kTicks / (2 * p.heads_per_split);
  const int scale = flags & kByHead ? p.heads_per_split : 1;
  const bool has_second = flags & kLaterTargets;
  return {p.num_tiles,
          p.work_tiles_per_tile,
          p.split_begin,
          p.split_end,
          p.splits_per_split_tile,
          p.split_ticks,
          p.num_ctas,
          late,
          ends_after,
          scale,
          has_second};
}

// A work tile, by its number: its tile, where its starts are, and how many: one, or where some
// tiles are split and this is not, as many as parts.
struct ExpectedWorkTile {
  int order_idx, at, starts;
};
template <bool kSplit>
__device__ __forceinline__ ExpectedWorkTile expected_work_tile(const ScheduleModel& h,
                                                               int work_tile) {
  if constexpr (!kSplit) return {work_tile / h.per_tile, work_tile, 1};
  const int per_whole = h.per_tile / h.parts, in_split = work_tile - h.split_begin * per_whole,
            split_tiles = h.split_end - h.split_begin;
  if (in_split >= 0 && in_split < split_tiles * h.per_tile)
    return {h.split_begin + in_split / h.per_tile, h.split_begin * h.per_tile + in_split, 1};
  if (in_split >= 0) work_tile -= split_tiles * (h.per_tile - per_whole);
  return {work_tile / per_whole, work_tile * h.parts, h.parts};
}

template <bool kSplit>
__device__ __forceinline__ void simulate_schedule(const ScheduleModel& h, const int32_t* costs,
                                                  int32_t* starts) {
  // Each lane keeps the ends of what some CTAs are at, the first one in front. Those that end
  // together take up work tiles together: mostly the heads of a tile, so it takes about as many
  // rounds as there are tiles.
  constexpr int kCtaSlots = kMaxWave / 32;
  const int whole = kSplit ? h.per_tile / h.parts : h.per_tile,
            work_tiles = h.tiles * whole + (h.split_end - h.split_begin) * (h.per_tile - whole);
  const int lane = threadIdx.x, num_ctas = h.num_ctas < work_tiles ? h.num_ctas : work_tiles;
  unsigned ends[kCtaSlots];
#pragma unroll
  for (int i = 0; i < kCtaSlots; ++i) ends[i] = 0;
  auto replace_first = [&](unsigned end) {
#pragma unroll
    for (int i = 0; i < kCtaSlots; ++i) {
      const unsigned behind = i + 1 < kCtaSlots ? ends[i + 1] : ~0u;
      ends[i] = end < behind ? end : behind;
      end = end < behind ? behind : end;
    }
  };
  auto begin = [&](const ExpectedWorkTile& x, int32_t* table, unsigned start) {
    for (int i = 0; i < x.starts; ++i) table[x.at + i] = start * h.scale;
    replace_first(start + (kSplit && x.starts == 1 ? h.split_ticks : kTicks) * costs[x.order_idx] +
                  h.ends_after);
  };
  for (int work_tile = lane; work_tile < 32 * kCtaSlots; work_tile += 32) {
    const ExpectedWorkTile x = expected_work_tile<kSplit>(h, work_tile);
    if (work_tile < num_ctas)
      begin(x, starts, x.order_idx * h.late);
    else
      replace_first(~0u);
  }
  const int all = h.has_second ? 2 * work_tiles : work_tiles;
  for (int work_tile = num_ctas; work_tile < all;) {
    const unsigned first = __reduce_min_sync(0xffffffff, ends[0]);
    const unsigned together = __ballot_sync(0xffffffff, ends[0] == first);
    const int mine = work_tile + __popc(together & ((1u << lane) - 1));
    const bool is_second = mine >= work_tiles;
    if (ends[0] == first && mine < all)
      begin(expected_work_tile<kSplit>(h, is_second ? mine - work_tiles : mine),
            starts + (is_second ? work_tiles : 0), first);
    work_tile += __popc(together);
  }
}

// One warp. `costs` are blocks of each tile, in the order in which they are taken up; `starts` by
// order index and kind of work tile, of the second L2 group behind the first.
__device__ __forceinline__ void expect_starts(const ScheduleModel& h, const int32_t* costs,
                                              int32_t* starts) {
  if (h.parts > 1)
    simulate_schedule<true>(h, costs, starts);
  else
    simulate_schedule<false>(h, costs, starts);
}

}  // namespace magi
