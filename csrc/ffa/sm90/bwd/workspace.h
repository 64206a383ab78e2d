// SPDX-License-Identifier: Apache-2.0
// How a backward is divided into work tiles, and what its workspace holds. Host side, without CUDA:
// tests compile it for machines that have none.
#pragma once

#include <algorithm>

#include "magi/abi.h"
#include "ffa/sm90/bwd/config.h"
#include "planner/schedule/l2_groups.h"

namespace magi {

inline int64_t bwd_tiles(const magi_ffa_bwd_params& a) {
  return (static_cast<int64_t>(a.total_k) + kTileBlockN - 1) / kTileBlockN;
}

template <typename C>
int64_t bwd_num_tiles_of_heads(const magi_ffa_bwd_params& a) {
  return bwd_tiles(a) * a.heads_kv * C::kPasses;
}

// Among how many work tiles the query heads of a tile are shared out, but no fewer than are asked
// for. The same on a device whatever is left free, so that sm_margin does not change results.
template <typename C>
int bwd_num_head_splits(const magi_ffa_bwd_params& a, int sms) {
  return num_head_splits(a.heads_q / a.heads_kv, bwd_num_tiles_of_heads<C>(a), a.num_head_splits,
                         kMaxHeadSplits, sms,
                         a.dq_mode != MAGI_DQ_ATOMIC || a.num_head_splits == 0);
}

// How many work tiles may be split, and into how many parts each.
struct BwdSplit {
  int slots = 0, parts = 1;
  int64_t values(int head_dim) const {
    return static_cast<int64_t>(slots) * kTileBlockN * head_dim;
  }  // of one part of all
};

// The split of the last wave of wide steps, whose work tiles the host lists; none where those of
// all tiles are split.
template <typename C>
BwdSplit bwd_last_round(const magi_ffa_bwd_params& a, int sms) {
  const int64_t work_tiles = bwd_num_tiles_of_heads<C>(a), last = work_tiles % sms;
  if (!C::kIsWide || !C::kSplit || a.dq_mode || work_tiles < 2 * sms ||
      bwd_num_head_splits<C>(a, sms) > 1)
    return {};
  const int group = a.heads_q / a.heads_kv;
  int parts = group < kTailParts ? group : kTailParts;
  while (group % parts) --parts;
  // The split saves so many parts of a wave. From 1% of all on that is worth the parts' traffic.
  const int64_t saved = parts - (last * parts + sms - 1) / sms;
  return last > 0 && 100 * saved * sms >= work_tiles * parts
             ? BwdSplit{static_cast<int>(last), parts}
             : BwdSplit{};
}

// In deterministic order: among how many work tiles the query heads of some tiles are shared out,
// whole ones where the caller asks for none.
inline int bwd_deterministic_splits(const magi_ffa_bwd_params& a) {
  return a.dq_mode == MAGI_DQ_DETERMINISTIC && a.split_begin < a.split_end ? a.splits_per_split_tile
                                                                           : 1;
}

// Whether the kernel with softcap and dropout runs.
inline bool bwd_is_general(const magi_ffa_bwd_params& a) {
  return a.softcap > 0.f || a.has_dropout;
}

// Whether dq of a block with a single contribution can be written at once: contributions are
// counted, and dq is rounded and not added to anything. The general kernel does not, nor does one
// that splits tiles.
inline bool bwd_can_store_direct(const magi_ffa_bwd_params& a) {
  return a.dq_mode != MAGI_DQ_ATOMIC && a.grad_dtype != MAGI_FP32 && !a.accumulate &&
         !bwd_is_general(a) && bwd_deterministic_splits(a) == 1;
}

// Whether what the caller says is split is a run of tiles, in parts that are a power of two of
// query heads that are one, too.
inline bool bwd_is_split_run(const magi_ffa_bwd_params& a) {
  const int group = a.heads_q / a.heads_kv, parts = a.splits_per_split_tile,
            heads = parts > 0 ? group / parts : 0;
  if (parts < 2 || parts > kTailParts || (parts & (parts - 1)) != 0 || heads * parts != group ||
      (heads & (heads - 1)) != 0)
    return false;
  const int64_t work_tiles = static_cast<int64_t>(a.split_end - a.split_begin) * a.heads_kv;
  return 0 <= a.split_begin && a.split_begin < a.split_end && a.split_end <= bwd_tiles(a) &&
         work_tiles < kMaxPartials;
}

// Whether there is a kernel that splits tiles as the caller says.
template <typename C>
bool bwd_has_deterministic_split(const magi_ffa_bwd_params& a, int sms) {
  return C::kIsWide && a.dq_mode == MAGI_DQ_DETERMINISTIC && bwd_num_head_splits<C>(a, sms) == 1 &&
         bwd_tiles(a) <= kMaxTimed;
}

// How many tiles begin at once: all their work tiles are among the first `num_ctas`. A whole tile
// has `work_tiles` of them.
inline int bwd_tiles_at_once(const magi_ffa_bwd_params& a, int num_ctas, int work_tiles) {
  const int parts = bwd_deterministic_splits(a), begin = parts > 1 ? a.split_begin : 0,
            split = parts > 1 ? a.split_end - begin : 0;
  const int left = num_ctas - begin * work_tiles;
  if (left <= 0) return num_ctas / work_tiles;
  const int at_once = std::min(left / (work_tiles * parts), split);
  return begin + at_once + (at_once < split ? 0 : left / work_tiles - split * parts);
}

// The kv heads of an L2 group of this call. If the caller splits tiles by query heads, because they
// are uneven, there is one group, so that the longest tiles of all heads come first.
template <typename C>
int bwd_heads_per_l2_group(const magi_ffa_bwd_params& a, int num_head_splits, int sms) {
  const int64_t tiles = bwd_tiles(a);
  if (tiles * a.heads_kv == 0) return 1;
  if (a.dq_mode && (a.num_head_splits > 1 || bwd_deterministic_splits(a) > 1)) return a.heads_kv;
  if (a.dq_mode == MAGI_DQ_DETERMINISTIC)
    return heads_per_l2_group_deterministic(tiles, a.heads_kv, num_head_splits,
                                            a.heads_q / a.heads_kv / num_head_splits, sms);
  return heads_per_l2_group(tiles * num_head_splits, a.heads_kv, 2ll * sms,
                            bwd_last_round<C>(a, sms).slots);
}

// Tables of semaphore targets: where there are several L2 groups, those behind the first have one
// of their own; but not of more tiles than are compared, where a table is large (half a gigabyte at
// a million tokens) and times count among few.
template <typename C>
int bwd_target_tables(const magi_ffa_bwd_params& a, int num_head_splits, int sms) {
  return bwd_tiles(a) <= kMaxTimed &&
                 bwd_heads_per_l2_group<C>(a, num_head_splits, sms) < a.heads_kv
             ? 2
             : 1;
}

// Whether a call takes a work list, in which tiles are perhaps split: work tiles are few, of one L2
// group, and the heads can be shared out.
template <typename C>
bool bwd_takes_work_list(const magi_ffa_bwd_params& a, int sms) {
  return C::kIsMedium && !a.dq_mode && !bwd_is_general(a) &&
         a.heads_q / a.heads_kv % kListedHeadSplits == 0 && bwd_num_head_splits<C>(a, sms) == 1 &&
         bwd_tiles(a) > 1 && bwd_num_tiles_of_heads<C>(a) <= kMaxWorkList &&
         bwd_heads_per_l2_group<C>(a, 1, sms) == a.heads_kv &&
         bwd_num_tiles_of_heads<C>(a) < int64_t(h100::kManyWorkTiles) * sms;
}
// Tiles of which there may be parts then.
inline int bwd_split_tiles(const magi_ffa_bwd_params& a) {
  return static_cast<int>((bwd_tiles(a) + 1) / 2);
}

// Like the number of parts of all tiles, it depends on the device and not on what is left free.
template <typename C>
BwdSplit bwd_split(const magi_ffa_bwd_params& a, int sms) {
  if (bwd_deterministic_splits(a) > 1)
    return {(a.split_end - a.split_begin) * a.heads_kv, a.splits_per_split_tile};
  if (bwd_takes_work_list<C>(a, sms)) return {bwd_split_tiles(a) * a.heads_kv, kListedHeadSplits};
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
int64_t bwd_num_m_blocks(const magi_ffa_bwd_params& a) {
  return (static_cast<int64_t>(a.total_q) + C::kBlockM - 1) / C::kBlockM;
}

// What BwdCompletion has.
template <typename C>
int64_t bwd_completion_bytes(const magi_ffa_bwd_params& a) {
  return 4 * a.heads_kv * (kListedHeadSplits * bwd_tiles(a) + bwd_num_m_blocks<C>(a));
}

// Byte offsets of what is made of the plan where contributions are counted. Flags of the plan,
// costs and starts come first. All calls of a plan make the same, so it may be kept.
struct BwdOrder {
  int64_t semaphore_targets, contributions_of_block, summed, direct_dq_store, bytes;
};

template <typename C>
BwdOrder bwd_order_layout(const magi_ffa_bwd_params& a, int parts, int sms) {
  if (!a.dq_mode) return {};
  const int64_t kinds = static_cast<int64_t>(bwd_heads_per_l2_group<C>(a, parts, sms)) * parts *
                        bwd_deterministic_splits(a);
  const int64_t work_tiles = bwd_tiles(a) * kinds * bwd_target_tables<C>(a, parts, sms),
                blocks = bwd_num_m_blocks<C>(a);
  BwdOrder o;
  o.semaphore_targets = whole_lines(4 * (1 + bwd_tiles(a) + work_tiles));
  o.contributions_of_block =
      o.semaphore_targets +
      whole_lines(a.dq_mode == MAGI_DQ_DETERMINISTIC ? 4 * work_tiles * blocks : 0);
  o.summed = o.contributions_of_block + 8 * blocks;
  o.direct_dq_store = o.summed + 4 * (1 + blocks);
  o.bytes = whole_lines(o.direct_dq_store + 4 * blocks);
  return o;
}

// Byte offsets into the workspace.
struct BwdWorkspace {
  int64_t stats, dq_accum, partials, completion, dq_semaphore, order, bytes;
};

template <typename C>
BwdWorkspace bwd_layout(const magi_ffa_bwd_params& a, int parts, int sms) {
  const int64_t blocks = bwd_num_m_blocks<C>(a) * a.heads_q;
  BwdWorkspace w;
  w.stats = 4 * kBwdCounters;
  w.dq_accum = w.stats + 4 * stat_floats(C::kBlockM) * blocks;
  w.partials = w.dq_accum + 4ll * dq_block_floats(C::kBlockM) * C::kAtoms * blocks;
  const int64_t of_parts = parts > 1 ? 4 * parts * (bwd_dk_values(a) + bwd_dv_values(a)) : 0;
  const BwdSplit split = bwd_split<C>(a, sms);
  // Each from a line of the cache on: they are written by one kernel and read by the next at
  // different times.
  w.completion = whole_lines(w.partials + of_parts +
                             4 * split.parts * split.values(a.head_dim + a.head_dim_v));
  const bool takes_list = bwd_takes_work_list<C>(a, sms);
  w.dq_semaphore = whole_lines(w.completion + (takes_list ? bwd_completion_bytes<C>(a) : 0));
  w.order = whole_lines(w.dq_semaphore + (a.dq_mode ? 4 * blocks : 0));
  w.bytes = w.order + bwd_order_layout<C>(a, parts, sms).bytes;
  return w;
}

// Sizes of the workspace, and of the order that the caller may keep (0: there is none).
struct BwdBytes {
  int64_t workspace, order;
};

template <typename C>
BwdBytes bwd_bytes(const magi_ffa_bwd_params& a, int sms) {
  const int parts = bwd_num_head_splits<C>(a, sms);
  const int64_t order = bwd_order_layout<C>(a, parts, sms).bytes;
  return {bwd_layout<C>(a, parts, sms).bytes, order <= kMostKeptOrder ? order : 0};
}

}  // namespace magi
