// SPDX-License-Identifier: Apache-2.0
// The scores of the keys of a block, as both directions of the indexer's divergence make them:
// products have keys as rows and heads as columns, so a thread adds up its heads of two keys.
#pragma once

#include "device/shared.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/indexer_kl/params.h"

namespace magi {

// NaN stays NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

// Over the four threads that share rows of an accumulator.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// sum_h weight_h * relu(dot_h) of this thread's two keys.
__device__ __forceinline__ void add_up_heads(const float (&dots)[kKlHeads / 2], uint32_t weights,
                                             float (&scores)[2]) {
  scores[0] = scores[1] = 0.f;
#pragma unroll
  for (int j = 0; j < kKlHeads / 8; ++j) {
    const float2 w = lds_float2(weights + 4 * (8 * j + 2 * (threadIdx.x % 4)));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scores[r] = fmaf(relu(dots[4 * j + 2 * r]), w.x, scores[r]);
      scores[r] = fmaf(relu(dots[4 * j + 2 * r + 1]), w.y, scores[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) scores[r] = sum_of_row(scores[r]);
}

// The upper of this thread's two rows of the 64 of a warpgroup; the other one is 8 below.
__device__ __forceinline__ int upper_row_of_thread() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// A thread of the producer brings its weight; zeros behind the last head.
__device__ __forceinline__ void load_weight(const IndexerOperands& p, uint32_t to, int query) {
  const int head = threadIdx.x;
  if (head >= kKlHeads) return;
  const int64_t at = static_cast<int64_t>(query) * p.heads + head;
  sts_int(to + 4 * head, __float_as_int(head < p.heads ? __ldg(p.weights + at) : 0.f));
}

}  // namespace magi
