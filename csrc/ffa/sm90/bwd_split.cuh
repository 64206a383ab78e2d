// SPDX-License-Identifier: Apache-2.0
// Units that are split, so that all multiprocessors end together. Each part leaves its dk and dv in the
// workspace, and a kernel adds them in the order of the parts. Three cases:
//
// Where there are about two units for each multiprocessor, documents of different lengths leave some idle at the end. There the
// kernel before the main one lists the units anew (bwd_list.cuh), and some are split: by query heads, or where one
// document ends and the next begins.
//
// Where there are more, the units of the last round are split if they are too few to fill it. Under a full mask, where all are
// equal, that round would otherwise take as long as the others; where the heaviest come first, parts of light ones cost little.
//
// In turns nothing is listed anew; there the caller says which tiles are split (kernels/split_tiles.py), all their units by query heads.
#pragma once

#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"

namespace magi {

// From the fourth word of a unit: in which slot a split one leaves its dk and dv, counted from one; zero for a whole one.
__device__ __forceinline__ int split_slot(int word) { return word >> kSlotBit; }

// Whether it has, for all heads, the blocks of queries before a cut, or those from it on: the low 15 bits, and the one above them.
__device__ __forceinline__ bool is_cut(int word) { return word >> kCutBit & 1; }
constexpr int kBehindCut = 1 << 15;

// Query heads of a unit.
template <typename C>
__device__ __forceinline__ int heads_of_unit(const BwdKernelParams& p, int word) {
  return C::kSplit && split_slot(word) > 0 && !(C::kListed && is_cut(word)) ? p.split_heads : p.heads_per_part;
}

// Number of a part among those of the same slot.
template <typename C>
__device__ __forceinline__ int part_of_unit(int word) {
  return C::kListed && is_cut(word) ? word / kBehindCut & 1 : BwdPart<C>::of_word(word).heads;
}

// Blocks of queries that a unit visits in a layer, which is given by its address in shared memory.
template <typename C>
__device__ __forceinline__ int2 blocks_of_unit(uint32_t layer, int word) {
  int2 blocks = blocks_of<C::kQueries>(lds_int2(layer));
  if (C::kListed && is_cut(word)) (word & kBehindCut ? blocks.x : blocks.y) = word & (kBehindCut - 1);
  return blocks;
}

}  // namespace magi
