// SPDX-License-Identifier: Apache-2.0
// In which order the last kernel of the backward takes up dq where that is summed in order (bwd_finish_turns.cuh). Tests compile this for the
// CPU, so `P` is BwdRowParams elsewhere.
#pragma once

#include <cstdint>

namespace magi {

// What a warpgroup takes up at a time: 64 columns, from 64 d on, of one head of a block. Blocks are counted in the order in which they should
// be complete.
struct FinishItem {
  int rank, head, d;  // rank -1: there are no more
};

// Number `number` of a section after the other, the last of which may have fewer heads; in each of so many blocks, and of a block of the heads.
template <typename P>
__device__ __forceinline__ FinishItem finish_item(const P& p, int blocks, int number) {
  const int at = number / p.dim_blocks, per_section = p.heads_per_section * (p.heads_q / p.heads_kv);
  if (at >= blocks * p.heads_q) return {-1, 0, 0};
  const int first = at / (per_section * blocks) * per_section, behind = p.heads_q - first;
  const int heads = behind < per_section ? behind : per_section, in_section = at - first * blocks;
  return {in_section / heads, first + in_section % heads, number % p.dim_blocks};
}

}  // namespace magi
