// SPDX-License-Identifier: Apache-2.0
// The order in which work tiles are taken up: from a linear index to a tile of the plan and a head.
#pragma once

#include <cstdint>

namespace magi {

// Linear index of a work tile, whose parts are not counted -> (index in the cost order, head
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

// The same where the first `split_tiles` of the order are work tiles `max_parts` times, part by
// part.
template <typename P>
__device__ __forceinline__ void split_work_coords(const P& p, int work_tile, int* order_idx,
                                                  int* head_unit, int* part) {
  const int extra = p.split_tiles * (p.max_parts - 1);
  const int per_l2_group = (p.num_tiles + extra) * p.heads_per_l2_group;
  const int l2_group = work_tile / per_l2_group;
  const int in_l2_group = work_tile - l2_group * per_l2_group;
  const int first = l2_group * p.heads_per_l2_group;
  const int heads = min(p.heads_per_l2_group, p.head_units - first);
  const bool is_split = in_l2_group < p.split_tiles * p.max_parts * heads;
  const int whole = is_split ? in_l2_group / p.max_parts : in_l2_group - extra * heads;
  *part = is_split ? in_l2_group - whole * p.max_parts : 0;
  *order_idx = whole / heads;
  *head_unit = first + whole - *order_idx * heads;
}

// How many parts a tile of so many key blocks has; `order_idx` is its place in the order.
template <typename P>
__device__ __forceinline__ int parts_of(const P& p, int order_idx, int num_blocks) {
  return order_idx < p.split_tiles ? min(p.max_parts, max(1, num_blocks / p.split_blocks)) : 1;
}

// The tile of that order index. The heads that come first may take their tiles in an order of their
// own.
template <typename P>
__device__ __forceinline__ int tile_of(const P& p, int order_at, int first_order_at, int work_tile,
                                       int order_idx) {
  const bool is_first = first_order_at != 0 && work_tile < p.num_tiles * p.heads_per_l2_group;
  return p.plan[(is_first ? first_order_at : order_at) + order_idx];
}

}  // namespace magi
