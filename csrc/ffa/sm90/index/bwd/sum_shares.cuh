// SPDX-License-Identifier: Apache-2.0
// Adds the shares that lists left of a key to its gradient, in the order in which the caller names
// them: a warp for each row.
#pragma once

#include <cstdint>

#include "magi/index.h"

namespace magi {

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) index_sum_shares(const magi_ffa_index_sum_params p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSumThreads / 32) + threadIdx.x / 32;
  if (row >= p.num_rows) return;
  const int begin = __ldg(p.begins + row), end = __ldg(p.begins + row + 1);
  if (begin >= end) return;
  for (int column = threadIdx.x % 32 * 4; column < p.width; column += 128) {
    float4* at = reinterpret_cast<float4*>(p.sums + row * p.width + column);
    float4 sum = *at;
    for (int i = begin; i < end; ++i) {
      const int64_t from = static_cast<int64_t>(__ldg(p.entries + i)) * p.width + column;
      const float4 share = __ldg(reinterpret_cast<const float4*>(p.partials + from));
      sum.x += share.x;
      sum.y += share.y;
      sum.z += share.z;
      sum.w += share.w;
    }
    *at = sum;
  }
}

}  // namespace magi
