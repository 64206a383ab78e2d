// SPDX-License-Identifier: Apache-2.0
// Which order fits a plan where dq is summed in order (bwd_turns.cuh), and when units are expected to start: how they are handed out,
// simulated by one warp ahead of the backward. Tests compile this for the CPU, so `P`, of which it takes sizes, is BwdRowParams elsewhere.
#pragma once

#include "bwd_config.h"
#include "bwd_plan.cuh"

namespace magi {

// Where L2 keeps most of Q, dO and dq (so many bytes were timed): how many query heads of a unit are few however few ranks are in work, and
// with how many units may begin apart.
constexpr int64_t kMostKept = 64 << 20;
constexpr int64_t walked_bytes(int64_t heads_q, int64_t total_q, int dim_blocks) { return heads_q * total_q * 8 * 64 * dim_blocks; }
constexpr int few_if_kept(int dim_blocks) { return dim_blocks == 1 ? kFewHeads : dim_blocks == 2 ? 1 : 0; }
constexpr int most_apart(int dim_blocks) { return dim_blocks == 1 ? 2 : 1; }

// A section of heads, in ticks of one head.
struct HandOut {
  int tiles, per_tile;  // units of each tile: one for each head unit, or for each part of those that are split
  int split_begin, split_end, parts, split_ticks;  // ranks that are, in how many parts, and what a block of one takes
  int places;           // CTAs
  int late;             // by which units of a tile that begin first are behind those of the tile before
  int ends_after;       // in addition to its blocks, what a unit takes
  int scale;            // by which starts are multiplied
  bool has_second;      // another section behind it has starts of its own
};

// Whether units that all walk one way begin some blocks apart. Bands are apart as they are. Of several sections, or of more heads in a unit,
// it lost where it was timed: what units walk is all over Q, dO and dq then, of which L2 has to keep more.
template <typename P>
__device__ __forceinline__ bool begin_apart(const P& p, int flags, int bands) {
  return bands == 0 && p.split_parts == 1 && flags & kTimed && p.heads_per_part <= most_apart(p.dim_blocks) && p.heads_per_section == p.heads_kv &&
         p.heads_per_part * walked_bytes(p.heads_q, p.total_q, p.dim_blocks) <= kMostKept;
}

// Whether so many query heads of a unit are few: their blocks are short steps.
template <typename P>
__device__ __forceinline__ bool has_few_heads(const P& p) {
  if (p.heads_per_part <= kFewHeads && p.wave >= kManyRanks * p.heads_per_part) return true;
  return p.heads_per_part <= few_if_kept(p.dim_blocks) && walked_bytes(p.heads_q, p.total_q, p.dim_blocks) <= kMostKept;
}

// The flags of a plan with so many layers that are bands, and others.
template <typename P>
__device__ __forceinline__ int flags_of(const P& p, int bands, int others, bool visits_twice) {
  // Of one head blocks have an expected time. And waves are of whole tiles.
  const bool by_head = bands > others && (p.first_stores || p.heads_per_part > 1) && p.split_parts == 1;
  if (visits_twice) return by_head ? kByHead : 0;
  const int flags = (by_head ? kByHead : 0) | (!by_head && p.num_tiles <= kMaxTimed ? kTimed : kInWaves);
  // Of plans in order only those have units whose tiles are ordered by document.
  const bool is_one_way = !p.first_stores && !by_head && has_few_heads(p);
  if (has_units(p.plan) || is_one_way) return flags | kAllBackwards | (is_one_way && begin_apart(p, flags, bands) ? kApart : 0);
  return flags | (!p.first_stores && !by_head && p.turn_tables == 2 ? kLaterTurns : 0);
}

// How units of the first section are handed out, and of the second behind it. Where there are several, each has more units than there are
// places.
template <typename P>
__device__ __forceinline__ HandOut hand_out_of(const P& p, int flags) {
  // What waiting for those before it takes a unit of the first, in halves of a step: twice what an addition takes, as to expect it late costs
  // less than early. And to begin and end a unit takes two steps and a half.
  const int late_halves = p.dim_blocks == 1 ? 5 : p.dim_blocks == 2 ? 3 : 2;
  const bool is_one_way = flags & (kByHead | kAllBackwards);
  const int late = is_one_way ? 0 : kTicks * late_halves / (2 * p.heads_per_part);
  const int ends_after = is_one_way && !(flags & kApart) ? 0 : 5 * kTicks / (2 * p.heads_per_part);
  const int scale = flags & kByHead ? p.heads_per_part : 1;
  const bool has_second = flags & kLaterTurns;
  return {p.num_tiles, p.units_per_tile, p.split_begin, p.split_end, p.split_parts, p.split_ticks, p.places, late, ends_after, scale, has_second};
}

// A unit, by its number: its tile, where its starts are, and how many: one, or where some tiles are split and this is not, as many as parts.
struct ExpectedUnit {
  int rank, at, starts;
};
template <bool kSplit>
__device__ __forceinline__ ExpectedUnit expected_unit(const HandOut& h, int unit) {
  if constexpr (!kSplit) return {unit / h.per_tile, unit, 1};
  const int per_whole = h.per_tile / h.parts, in_split = unit - h.split_begin * per_whole, split_tiles = h.split_end - h.split_begin;
  if (in_split >= 0 && in_split < split_tiles * h.per_tile)
    return {h.split_begin + in_split / h.per_tile, h.split_begin * h.per_tile + in_split, 1};
  if (in_split >= 0) unit -= split_tiles * (h.per_tile - per_whole);
  return {unit / per_whole, unit * h.parts, h.parts};
}

template <bool kSplit>
__device__ __forceinline__ void simulate_hand_out(const HandOut& h, const int32_t* costs, int32_t* starts) {
  // Each lane keeps the ends of what some CTAs are at, the first one in front. Those that end together take up units together: mostly the
  // heads of a tile, so it takes about as many rounds as there are tiles.
  constexpr int kPlaces = kMaxWave / 32;
  const int whole = kSplit ? h.per_tile / h.parts : h.per_tile, units = h.tiles * whole + (h.split_end - h.split_begin) * (h.per_tile - whole);
  const int lane = threadIdx.x, places = h.places < units ? h.places : units;
  unsigned ends[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) ends[i] = 0;
  auto replace_first = [&](unsigned end) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const unsigned behind = i + 1 < kPlaces ? ends[i + 1] : ~0u;
      ends[i] = end < behind ? end : behind;
      end = end < behind ? behind : end;
    }
  };
  auto begin = [&](const ExpectedUnit& x, int32_t* table, unsigned start) {
    for (int i = 0; i < x.starts; ++i) table[x.at + i] = start * h.scale;
    replace_first(start + (kSplit && x.starts == 1 ? h.split_ticks : kTicks) * costs[x.rank] + h.ends_after);
  };
  for (int unit = lane; unit < 32 * kPlaces; unit += 32) {
    const ExpectedUnit x = expected_unit<kSplit>(h, unit);
    if (unit < places)
      begin(x, starts, x.rank * h.late);
    else
      replace_first(~0u);
  }
  const int all = h.has_second ? 2 * units : units;
  for (int unit = places; unit < all;) {
    const unsigned first = __reduce_min_sync(0xffffffff, ends[0]);
    const unsigned together = __ballot_sync(0xffffffff, ends[0] == first);
    const int mine = unit + __popc(together & ((1u << lane) - 1));
    const bool is_second = mine >= units;
    if (ends[0] == first && mine < all) begin(expected_unit<kSplit>(h, is_second ? mine - units : mine), starts + (is_second ? units : 0), first);
    unit += __popc(together);
  }
}

// One warp. `costs` are blocks of each tile, in the order in which they are taken up; `starts` by rank and kind of unit, of the second section
// behind the first.
__device__ __forceinline__ void expect_starts(const HandOut& h, const int32_t* costs, int32_t* starts) {
  if (h.parts > 1)
    simulate_hand_out<true>(h, costs, starts);
  else
    simulate_hand_out<false>(h, costs, starts);
}

}  // namespace magi
