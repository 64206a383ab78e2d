// SPDX-License-Identifier: Apache-2.0
// The order in which work tiles are taken up: from a linear index to a tile of the plan and a head.
#pragma once

#include <cstdint>

namespace magi {

// Linear index of a work tile, whose parts are not counted -> (rank in the cost order, head
// unit). Inside an L2 group of heads the heaviest tiles of all its heads come first; L2 groups
// follow one another so that what their CTAs read stays in L2.
template <typename P>
__device__ __forceinline__ void work_tile_coords(const P& p, int work_tile, int* order_idx,
                                                 int* head_unit) {
  const int per_l2_group = p.num_tiles * p.heads_per_l2_group;
  const int l2_group = work_tile / per_l2_group;
  const int in_l2_group = work_tile - l2_group * per_l2_group;
  const int first = l2_group * p.heads_per_l2_group;
  const int heads = min(p.heads_per_l2_group, p.head_units - first);
  *order_idx = in_l2_group / heads;
  *head_unit = first + in_l2_group - *order_idx * heads;
}

// The tile of that rank. The heads that come first may take their tiles in an order of their own.
template <typename P>
__device__ __forceinline__ int tile_of(const P& p, int order_at, int first_order_at, int work_tile,
                                       int order_idx) {
  const bool is_first = first_order_at != 0 && work_tile < p.num_tiles * p.heads_per_l2_group;
  return p.plan[(is_first ? first_order_at : order_at) + order_idx];
}

}  // namespace magi
