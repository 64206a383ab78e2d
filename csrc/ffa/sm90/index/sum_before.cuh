// SPDX-License-Identifier: Apache-2.0
// A sum over the threads of the CTAs that make lists.
#pragma once

#include <cstdint>

namespace magi {

constexpr int kPrepareThreads = 256;
constexpr int kPrepareWarps = kPrepareThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Adds up over the CTA: what the threads before this one have; `total` is that of all.
__device__ __forceinline__ int sum_before(int mine, uint32_t* warps, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int before = 0;
  *total = 0;
#pragma unroll
  for (int w = 0; w < kPrepareWarps; ++w) {
    if (w < warp) before += static_cast<int>(warps[w]);
    *total += static_cast<int>(warps[w]);
  }
  __syncthreads();
  return before + upto - mine;
}

}  // namespace magi
