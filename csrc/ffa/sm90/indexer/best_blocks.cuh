// SPDX-License-Identifier: Apache-2.0
// The blocks of keys with the highest ranks of each list of a query. Its last ones may come first.
#pragma once

#include <cmath>

#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/indexer/radix_select.cuh"

namespace magi {

// One CTA for a list.
__global__ void __launch_bounds__(kPrepareThreads)
    indexer_best_blocks(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const int query_here = static_cast<int>(blockIdx.x) / p.num_lists;
  const int2 seen = visible_keys(p, static_cast<int64_t>(p.first_query) + query_here);
  const int num_blocks = (seen.y - seen.x + p.block_size - 1) / p.block_size;
  uint32_t* row = p.ranks + blockIdx.x * p.pitch;
  if (num_blocks > p.num_best) {  // else all are taken
    for (int i = threadIdx.x; i < p.local_blocks; i += kPrepareThreads)
      row[num_blocks - 1 - i] = rank_of(INFINITY);
    __syncthreads();
  }
  const int64_t list = static_cast<int64_t>(p.first_query) * p.num_lists + blockIdx.x;
  write_best(row, make_int2(0, num_blocks), p.num_best, reinterpret_cast<uint32_t*>(raw),
             p.lists + list * p.num_best);
}

}  // namespace magi
