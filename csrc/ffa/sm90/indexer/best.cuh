// SPDX-License-Identifier: Apache-2.0
// The keys with the highest scores of each query.
#pragma once

#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/indexer/radix_select.cuh"

namespace magi {

// One CTA for a query.
__global__ void __launch_bounds__(kPrepareThreads)
    indexer_best(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const int64_t query = static_cast<int64_t>(p.first_query) + blockIdx.x;
  write_best(p.scores + blockIdx.x * p.pitch, visible_keys(p, query), p.num_best,
             reinterpret_cast<uint32_t*>(raw), p.lists + query * p.num_best);
}

}  // namespace magi
