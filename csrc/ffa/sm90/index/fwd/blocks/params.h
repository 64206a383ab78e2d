// SPDX-License-Identifier: Apache-2.0
// What the forward of block lists is launched with.
#pragma once

#include "ffa/sm90/fwd/params.h"

namespace magi {

struct ListOrderParams {
  const int32_t* counts;  // (lists, heads_kv): entries
  int32_t* order;         // (heads_kv, lists), written
  int32_t* counter;       // of work tiles, cleared
  int32_t num_lists, heads_kv;
};

// Tiles are those of the dense forward, whose rows are all query heads of a kv head, token by
// token. Its plan, splits, sinks and remote keys are not used, and the workspace is the counter of
// work tiles alone.
struct IndexBlocksParams : FwdKernelParams {
  const int32_t* lists;   // (lists, heads_kv, max_entries)
  const int32_t* counts;  // (lists, heads_kv): entries
  const int32_t* order;   // (heads_kv, lists), see list_order.cuh
  int32_t num_lists, max_entries, heads_kv, k_block;
  int32_t tiles_of_list;
  int32_t box_rows;  // keys that one copy brings
};

// Where a list is among those of all kv heads.
__device__ __forceinline__ int64_t list_number(const IndexBlocksParams& p, int list, int kv_head) {
  return static_cast<int64_t>(list) * p.heads_kv + kv_head;
}

}  // namespace magi
