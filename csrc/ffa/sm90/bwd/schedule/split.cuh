// SPDX-License-Identifier: Apache-2.0
// Work tiles that are split, so that all SMs end together. Each part leaves its dk and dv in the
// workspace, and a kernel adds them in the order of the parts. Three cases:
//
// With about two work tiles for each SM, documents of different lengths leave some SMs idle at the
// end. The host makes a work list (magi/schedule.h), in which some work tiles are split: by query
// heads, or where one document ends and the next begins.
//
// With more of them, in m-blocks of 80, the host splits the work tiles of the last wave if they are
// too few to fill it. Under a full mask all work tiles are equal, and that wave would otherwise
// take as long as the others. Where the heaviest come first, parts of light ones cost little.
//
// In deterministic order there is no work list. The caller says which tiles are split
// (csrc/planner/schedule/splits.cpp): all their work tiles, by query heads.
#pragma once

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/smem.cuh"

namespace magi {

// From the fourth word of a work tile: in which partial a split one leaves its dk and dv, counted
// from one; zero for a whole one.
__device__ __forceinline__ int partial_idx(int word) { return word >> kPartialBit; }

// Whether the work tile is one side of a split along the queries, with all heads: the blocks before
// an m-block, or those from it on.
__device__ __forceinline__ bool is_cut(int word) {
  return partial_idx(word) > 0 && word >> kCutBit & 1;
}

// Whether some tiles are split, where dq is summed in order.
template <typename C>
__device__ __forceinline__ bool is_split_in_order(const BwdKernelParams& p) {
  return C::kSplit && C::kSemaphored && p.parts_shift > 0;
}

// Whether a word has a partial: elsewhere these bits may be a shift.
template <typename C>
__device__ __forceinline__ bool is_partial(const BwdKernelParams& p, int word) {
  return C::kSplit && (!C::kSemaphored || p.parts_shift > 0) && partial_idx(word) > 0;
}

// Query heads of a work tile, and the first of those among the heads of its kv head.
template <typename C>
__device__ __forceinline__ int heads_of_work_tile(const BwdKernelParams& p, int word) {
  if (C::kWorkList && is_cut(word)) return p.group;
  if (is_partial<C>(p, word)) return p.split_heads;
  if constexpr (C::kSemaphored) return p.heads_per_split;
  return p.heads_per_split + (BwdHeadSplit<C>::of_word(word).heads < p.longer_splits);
}
template <typename C>
__device__ __forceinline__ int first_head_of_work_tile(const BwdKernelParams& p, int word) {
  if (C::kWorkList && is_cut(word)) return 0;
  const int split = BwdHeadSplit<C>::of_word(word).heads;
  if (is_partial<C>(p, word)) return split * p.split_heads;
  if constexpr (C::kSemaphored) return split * p.heads_per_split;
  return split * p.heads_per_split + min(split, p.longer_splits);
}

// A tile of many segments, as under block-sparse masks, is walked once for each head. CTAs are at
// different blocks of queries then, and what they share stays in L2 only as long as it is that of
// one head.
template <typename C>
__device__ __forceinline__ bool walks_by_head(int segments) {
  return !C::kSemaphored && segments >= kManySegments;
}

// Which of its segments a work tile has still to come to, and, from bit kWalkBit on, one more than
// the head if it does so once for each.
constexpr int kWalkBit = 24;

template <typename C>
__device__ __forceinline__ int first_visit(int segments) {
  return segments | (walks_by_head<C>(segments) ? 1 << kWalkBit : 0);
}
__device__ __forceinline__ int visits_left(int word) { return word & ((1 << kWalkBit) - 1); }
// -1 if all heads are at once.
__device__ __forceinline__ int walked_head(int word) { return (word >> kWalkBit) - 1; }
// The next head, from the last segment of the one before, which will be counted.
__device__ __forceinline__ int next_walk(int word, int segments) {
  return ((word >> kWalkBit) + 1) << kWalkBit | (segments + 1);
}

// Number of a part, or side of a cut, among those of the same partial.
__device__ __forceinline__ int split_of_work_tile(int word) { return word & ((1 << kCutBit) - 1); }

// Blocks of queries that the work tile of a stage visits in a segment, which is given by its
// address in shared memory.
template <typename C>
__device__ __forceinline__ int2 blocks_of_work_tile(const BwdSmem<C>& smem, uint32_t segment,
                                                    uint32_t stage) {
  const int2 blocks = blocks_of<C::kBlockM>(lds_int2(segment));
  if constexpr (!C::kWorkList) return blocks;
  const int range = lds_int(smem.m_range(stage));
  return make_int2(max(blocks.x, range & 0xffff),
                   min(blocks.y, static_cast<int>(static_cast<uint32_t>(range) >> 16)));
}
constexpr int kAllBlocks = static_cast<int>(0xffff0000);  // m_begin 0, m_end behind all

}  // namespace magi
