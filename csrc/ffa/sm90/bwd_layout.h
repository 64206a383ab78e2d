// SPDX-License-Identifier: Apache-2.0
// How a backward is cut into units, and what its workspace holds. Host side, without CUDA: tests compile it for machines that have none.
#pragma once

#include <algorithm>

#include "../../include/magi/abi.h"
#include "bwd_config.h"

namespace magi {

inline int64_t bwd_tiles(const magi_ffa_bwd_params& a) { return (static_cast<int64_t>(a.total_k) + kTileKeys - 1) / kTileKeys; }

template <typename C>
int64_t bwd_tile_units(const magi_ffa_bwd_params& a) {
  return bwd_tiles(a) * a.heads_kv * C::kPasses;
}

// Among how many units the query heads of a tile are shared out: as few as make two units for each multiprocessor, but no fewer than are
// asked for. The same on a device whatever is left free, so that sm_margin does not change results.
template <typename C>
int bwd_head_parts(const magi_ffa_bwd_params& a, int sms) {
  const int group = a.heads_q / a.heads_kv;
  const int64_t units = bwd_tile_units<C>(a), wanted = 19 * sms / 10;
  int most = 1;
  for (int parts = 1; parts <= group && parts <= kMostHeadParts; ++parts) {
    if (group % parts != 0) continue;
    most = parts;
    if (parts >= a.head_parts && units * parts >= wanted) break;
  }
  return most;
}

// How many units may be split, and into how many parts each.
struct BwdSplit {
  int slots = 0, parts = 1;
  int64_t values(int head_dim) const { return static_cast<int64_t>(slots) * kTileKeys * head_dim; }  // of one part of all
};

// Of the last round, where units are not listed.
template <typename C>
BwdSplit bwd_last_round(const magi_ffa_bwd_params& a, int sms) {
  const int64_t units = bwd_tile_units<C>(a), last = units % sms;
  if (C::kD != 128 || a.dq_order || a.softcap > 0.f || units < 2 * sms) return {};
  const int group = a.heads_q / a.heads_kv;
  int parts = group < kTailParts ? group : kTailParts;
  while (group % parts) --parts;
  // Parts of a round that are saved; worth the traffic of the parts from 1% of all on.
  const int64_t saved = parts - (last * parts + sms - 1) / sms;
  return last > 0 && 100 * saved * sms >= units * parts ? BwdSplit{static_cast<int>(last), parts} : BwdSplit{};
}

// In turns: among how many units the query heads of some tiles are shared out, whole ones where the caller asks for none.
inline int bwd_turn_parts(const magi_ffa_bwd_params& a) {
  return a.dq_order == MAGI_DQ_IN_TURNS && a.split_begin < a.split_end ? a.split_parts : 1;
}

// Whether dq of a block that has a sole visit can be written at once: visits are counted, and it is rounded, with nothing to be added to. There
// is no kernel with softcap, nor one that splits tiles.
inline bool bwd_can_write_sole(const magi_ffa_bwd_params& a) {
  return a.dq_order != MAGI_DQ_ANY && a.grad_dtype != MAGI_FP32 && !a.accumulate && a.softcap == 0.f && bwd_turn_parts(a) == 1;
}

// Whether what the caller says is split is a run of tiles, in parts that are a power of two of query heads that are one, too.
inline bool bwd_is_split_run(const magi_ffa_bwd_params& a) {
  const int group = a.heads_q / a.heads_kv, parts = a.split_parts, heads = parts > 0 ? group / parts : 0;
  if (parts < 2 || parts > kTailParts || (parts & (parts - 1)) != 0 || heads * parts != group || (heads & (heads - 1)) != 0) return false;
  const int64_t units = static_cast<int64_t>(a.split_end - a.split_begin) * a.heads_kv;
  return 0 <= a.split_begin && a.split_begin < a.split_end && a.split_end <= bwd_tiles(a) && units < kMostSplit;
}

// Whether there is a kernel that splits tiles as the caller says.
template <typename C>
bool bwd_has_turn_split(const magi_ffa_bwd_params& a, int sms) {
  return C::kWide && a.dq_order == MAGI_DQ_IN_TURNS && bwd_head_parts<C>(a, sms) == 1 && bwd_tiles(a) <= kMaxTimed;
}

// How many ranks, if whole tiles have so many units, all of whose units are among the first so many.
inline int bwd_ranks_at_once(const magi_ffa_bwd_params& a, int places, int units) {
  const int parts = bwd_turn_parts(a), begin = parts > 1 ? a.split_begin : 0, split = parts > 1 ? a.split_end - begin : 0;
  const int left = places - begin * units;
  if (left <= 0) return places / units;
  const int at_once = std::min(left / (units * parts), split);
  return begin + at_once + (at_once < split ? 0 : left / units - split * parts);
}

// As many kv heads that the heaviest tiles of a section, one for each multiprocessor, are half of it. Where that is one section or
// two, these are alike, or the long tiles of a small one behind the other would end alone; unless all of it is split. Where the
// caller asks for parts, of all tiles or some, because they are uneven, it is one, so that the longest of all heads come first.
// Lists of wide steps have the same rule, but for what is split, in magi_attention/kernels/unit_walks.py.
template <typename C>
int bwd_heads_at_once(const magi_ffa_bwd_params& a, int head_parts, int sms, int64_t at_once) {
  const int64_t tile_parts = bwd_tiles(a) * head_parts, units = tile_parts * a.heads_kv;
  const int64_t heads = std::min<int64_t>(std::max<int64_t>((at_once + tile_parts / 2) / tile_parts, 1), a.heads_kv);
  const int64_t small = a.heads_kv % heads * tile_parts, sections = (units + at_once / 2) / at_once;
  if (sections > 2 || (small > 0 && small <= bwd_last_round<C>(a, sms).slots)) return static_cast<int>(heads);
  return sections < 2 ? a.heads_kv : (a.heads_kv + 1) / 2;
}

// In turns, with one or two query heads in a unit, a section is twice that, as long as all can walk one way: units that begin together at
// the same blocks wait for each other, and of as many heads there are half as many (docs/notes/ffa_backward_turns.md).
template <typename C>
int bwd_heads_per_section(const magi_ffa_bwd_params& a, int head_parts, int sms) {
  if (bwd_tiles(a) * a.heads_kv == 0) return 1;
  if (a.dq_order && (a.head_parts > 1 || bwd_turn_parts(a) > 1)) return a.heads_kv;
  const int heads_per_part = a.heads_q / a.heads_kv / head_parts;
  if (a.dq_order == MAGI_DQ_IN_TURNS && heads_per_part <= kLargeSections) {
    const int heads = bwd_heads_at_once<C>(a, head_parts, sms, 4ll * sms);
    if (sms / (heads * head_parts * C::kPasses) >= kManyRanks * heads_per_part) return heads;
  }
  return bwd_heads_at_once<C>(a, head_parts, sms, 2ll * sms);
}

// Tables of turns: where there are several sections, those behind the first have one of their own; but not of more tiles than are
// compared, where a table is large (half a gigabyte at a million tokens) and times count among few.
template <typename C>
int bwd_turn_tables(const magi_ffa_bwd_params& a, int head_parts, int sms) {
  return bwd_tiles(a) <= kMaxTimed && bwd_heads_per_section<C>(a, head_parts, sms) < a.heads_kv ? 2 : 1;
}

// Whether units may be listed anew, and tiles perhaps split: units are few, of one section, and the heads can be shared out.
template <typename C>
bool bwd_lists_units(const magi_ffa_bwd_params& a, int sms) {
  return C::kD == 128 && !a.dq_order && a.softcap == 0.f && a.heads_q / a.heads_kv % kSplitParts == 0 &&
         bwd_head_parts<C>(a, sms) == 1 && bwd_tiles(a) > 1 && bwd_tile_units<C>(a) <= kMaxListed &&
         bwd_heads_per_section<C>(a, 1, sms) == a.heads_kv && bwd_tile_units<C>(a) < 3ll * sms;
}
// Tiles of which there may be parts then.
inline int bwd_split_tiles(const magi_ffa_bwd_params& a) { return static_cast<int>((bwd_tiles(a) + 1) / 2); }

// Like the number of parts of all tiles, it depends on the device and not on what is left free.
template <typename C>
BwdSplit bwd_split(const magi_ffa_bwd_params& a, int sms) {
  if (bwd_turn_parts(a) > 1) return {(a.split_end - a.split_begin) * a.heads_kv, a.split_parts};
  if (bwd_lists_units<C>(a, sms)) return {bwd_split_tiles(a) * a.heads_kv, kSplitParts};
  return bwd_last_round<C>(a, sms);
}

inline int64_t whole_lines(int64_t bytes) { return (bytes + 127) / 128 * 128; }

inline int64_t bwd_dk_values(const magi_ffa_bwd_params& a) {
  return static_cast<int64_t>(a.total_k) * a.heads_kv * a.head_dim;
}
inline int64_t bwd_dv_values(const magi_ffa_bwd_params& a) {
  return static_cast<int64_t>(a.total_k) * a.heads_kv * a.head_dim_v;
}

template <typename C>
int64_t bwd_query_blocks(const magi_ffa_bwd_params& a) {
  return (static_cast<int64_t>(a.total_q) + C::kQueries - 1) / C::kQueries;
}

// Parts of the query heads of a kv head, of blocks of dq and of split tiles, which the last kernel takes up when they are complete.
template <typename C>
int64_t bwd_entries(const magi_ffa_bwd_params& a) {
  return kSplitParts * a.heads_kv * (bwd_query_blocks<C>(a) + bwd_split_tiles(a));
}
inline int bwd_tile_words(const magi_ffa_bwd_params& a) { return static_cast<int>((bwd_tiles(a) + 31) / 32); }
template <typename C>
int64_t bwd_completion_bytes(const magi_ffa_bwd_params& a) {
  return 4 * (kSplitParts * bwd_tiles(a) * a.heads_kv + bwd_query_blocks<C>(a) * (bwd_tile_words(a) + a.heads_kv) + 2 * bwd_entries<C>(a));
}

// A list of units, in bytes from its start.
struct BwdList {
  int64_t units, first_left, first_blocks, bytes;
};

template <typename C>
BwdList bwd_list_layout(const magi_ffa_bwd_params& a) {
  BwdList l;
  l.units = 4 * kListHeader;
  l.first_left = l.units + 16 * kSplitParts * bwd_tile_units<C>(a);
  l.first_blocks = l.first_left + 4 * kSplitParts * bwd_tiles(a) * a.heads_kv;
  l.bytes = whole_lines(l.first_blocks + 4 * bwd_query_blocks<C>(a));
  return l;
}

// What is made of the plan where visits to blocks are counted, byte offsets: flags of the plan, costs and starts come first. The same in all calls
// of a plan, so it may be kept.
struct BwdOrder {
  int64_t turns, turns_of_block, summed, sole_visits, bytes;
};

template <typename C>
BwdOrder bwd_order_layout(const magi_ffa_bwd_params& a, int parts, int sms) {
  if (!a.dq_order) return {};
  const int64_t kinds = static_cast<int64_t>(bwd_heads_per_section<C>(a, parts, sms)) * parts * C::kPasses * bwd_turn_parts(a);
  const int64_t units = bwd_tiles(a) * kinds * bwd_turn_tables<C>(a, parts, sms), blocks = bwd_query_blocks<C>(a);
  BwdOrder o;
  o.turns = whole_lines(4 * (1 + bwd_tiles(a) + units));
  o.turns_of_block = o.turns + whole_lines(a.dq_order == MAGI_DQ_IN_TURNS ? 4 * units * blocks : 0);
  o.summed = o.turns_of_block + 8 * blocks;
  o.sole_visits = o.summed + 4 * (1 + blocks);
  o.bytes = whole_lines(o.sole_visits + 4 * blocks);
  return o;
}

// Byte offsets into the workspace.
struct BwdWorkspace {
  int64_t stats, dq_sum, partials, list, completion, turn_flags, order, bytes;
};

template <typename C>
BwdWorkspace bwd_layout(const magi_ffa_bwd_params& a, int parts, int sms) {
  const int64_t blocks = bwd_query_blocks<C>(a) * a.heads_q;
  BwdWorkspace w;
  w.stats = 4 * kBwdCounters;
  w.dq_sum = w.stats + 4 * stat_floats(C::kQueries) * blocks;
  w.partials = w.dq_sum + 4ll * dq_block_floats(C::kQueries) * (C::kD / 64) * blocks;
  w.list = w.partials + (parts > 1 ? 4 * parts * (bwd_dk_values(a) + bwd_dv_values(a)) : 0);
  const BwdSplit units_split = bwd_split<C>(a, sms);
  w.list = whole_lines(w.list + 4 * units_split.parts * units_split.values(a.head_dim + a.head_dim_v));
  // Each from a line of the cache on: they are written by one kernel and read by the next at different times.
  const bool lists = bwd_lists_units<C>(a, sms);
  w.completion = w.list + (lists ? bwd_list_layout<C>(a).bytes : 0);
  w.turn_flags = whole_lines(w.completion + (lists ? bwd_completion_bytes<C>(a) : 0));
  w.order = whole_lines(w.turn_flags + (a.dq_order ? 4 * C::kPasses * blocks : 0));
  w.bytes = w.order + bwd_order_layout<C>(a, parts, sms).bytes;
  return w;
}

// Of the workspace, and of what the caller may keep, 0 where there is nothing: a list of units, or what order is made of.
struct BwdBytes {
  int64_t workspace, list;
};

template <typename C>
BwdBytes bwd_bytes(const magi_ffa_bwd_params& a, int sms) {
  const int parts = bwd_head_parts<C>(a, sms);
  const int64_t order = bwd_order_layout<C>(a, parts, sms).bytes, kept = order <= kMostKeptOrder ? order : 0;
  return {bwd_layout<C>(a, parts, sms).bytes, bwd_lists_units<C>(a, sms) ? bwd_list_layout<C>(a).bytes : kept};
}

}  // namespace magi
