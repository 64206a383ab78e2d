// SPDX-License-Identifier: Apache-2.0
// What a block of keys gets of one list: rows of an accumulator, added to sums in global memory or
// left beside them.
#pragma once

#include "ffa/common/ptx/atomics.cuh"

namespace magi {

// A thread's place among the 64 rows of its warpgroup: rows lane / 4 and + 8 of its warp. Of each
// pair of threads the first writes four columns of the upper row, the second those of the lower.
template <int kColumns>
__device__ __forceinline__ void write_shares(const float (&x)[kColumns / 2], float* row, int width,
                                             bool adds, int lane) {
  const bool lower = lane & 1;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float a = __shfl_xor_sync(0xffffffff, lower ? x[4 * j] : x[4 * j + 2], 1);
    const float b = __shfl_xor_sync(0xffffffff, lower ? x[4 * j + 1] : x[4 * j + 3], 1);
    const int column = 8 * j + 4 * (lane % 4 / 2);
    if (row == nullptr || column >= width) continue;
    const float4 four = lower ? make_float4(a, b, x[4 * j + 2], x[4 * j + 3])
                              : make_float4(x[4 * j], x[4 * j + 1], a, b);
    if (adds)
      add_to_global_x4(row + column, four.x, four.y, four.z, four.w);
    else
      *reinterpret_cast<float4*>(row + column) = four;
  }
}

}  // namespace magi
