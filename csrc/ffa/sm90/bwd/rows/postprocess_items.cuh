// SPDX-License-Identifier: Apache-2.0
// In which order the last kernel of a deterministic backward takes up blocks of dq
// (bwd/rows/postprocess_deterministic.cuh). Tests compile this for the CPU, so `P` is BwdRowParams
// only on the GPU.
#pragma once

#include <cstdint>

namespace magi {

// What a warpgroup takes up at a time: 64 columns, from 64 d on, of one head of a block. Blocks are
// counted in the order in which they should be complete.
struct PostprocessItem {
  int order_idx, head, d;  // order index -1: there are no more
};

// Number `number` of an L2 group after the other, the last of which may have fewer heads; in each
// of so many blocks, and of a block of the heads.
template <typename P>
__device__ __forceinline__ PostprocessItem postprocess_item(const P& p, int blocks, int number) {
  const int at = number / p.dim_blocks,
            per_l2_group = p.heads_per_l2_group * (p.heads_q / p.heads_kv);
  if (at >= blocks * p.heads_q) return {-1, 0, 0};
  const int first = at / (per_l2_group * blocks) * per_l2_group, behind = p.heads_q - first;
  const int heads = behind < per_l2_group ? behind : per_l2_group,
            in_l2_group = at - first * blocks;
  return {in_l2_group / heads, first + in_l2_group % heads, number % p.dim_blocks};
}

}  // namespace magi
