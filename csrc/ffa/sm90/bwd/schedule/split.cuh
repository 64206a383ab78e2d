// SPDX-License-Identifier: Apache-2.0
// Work tiles that are split, so that all multiprocessors end together. Each part leaves its dk and
// dv in the workspace, and a kernel adds them in the order of the parts. Three cases:
//
// Where there are about two work tiles for each multiprocessor, documents of different lengths
// leave some idle at the end. There the host makes a work list (magi/schedule.h), in which some are
// split: by query heads, or where one document ends and the next begins.
//
// Where there are more, the work tiles of the last round are split if they are too few to fill it.
// Under a full mask, where all are equal, that round would otherwise take as long as the others;
// where the heaviest come first, parts of light ones cost little.
//
// In deterministic order there is no work list; the caller says which tiles are split
// (kernels/ffa/schedule/tile_splits.py), all their work tiles by query heads.
#pragma once

#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/smem.cuh"

namespace magi {

// From the fourth word of a work tile: in which partial a split one leaves its dk and dv, counted
// from one; zero for a whole one.
__device__ __forceinline__ int partial_idx(int word) { return word >> kPartialBit; }

// Whether it has, for all heads, the blocks of queries before a cut, or those from it on: the low
// 15 bits, and the one above them.
__device__ __forceinline__ bool is_cut(int word) { return word >> kCutBit & 1; }
constexpr int kBehindCut = 1 << 15;

// Query heads of a work tile.
template <typename C>
__device__ __forceinline__ int heads_of_work_tile(const BwdKernelParams& p, int word) {
  return C::kSplit && partial_idx(word) > 0 && !(C::kWorkList && is_cut(word)) ? p.split_heads
                                                                               : p.heads_per_split;
}

// Number of a part among those of the same partial.
template <typename C>
__device__ __forceinline__ int split_of_work_tile(int word) {
  return C::kWorkList && is_cut(word) ? word / kBehindCut & 1
                                      : BwdHeadSplit<C>::of_word(word).heads;
}

// Blocks of queries that a work tile visits in a segment, which is given by its address in shared
// memory.
template <typename C>
__device__ __forceinline__ int2 blocks_of_work_tile(uint32_t segment, int word) {
  int2 blocks = blocks_of<C::kBlockM>(lds_int2(segment));
  if (C::kWorkList && is_cut(word))
    (word & kBehindCut ? blocks.x : blocks.y) = word & (kBehindCut - 1);
  return blocks;
}

}  // namespace magi
