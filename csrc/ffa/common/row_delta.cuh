// SPDX-License-Identifier: Apache-2.0
// delta = sum(out * dout) of a row of queries, by eight lanes.
#pragma once

#include "ffa/common/scores.cuh"

namespace magi {

// The share of 16 bytes of out and of dout.
template <typename T>
__device__ __forceinline__ float chunk_delta(uint4 out, uint4 dout) {
  const uint32_t x[4] = {out.x, out.y, out.z, out.w}, y[4] = {dout.x, dout.y, dout.z, dout.w};
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 u = unpack_pair<T>(x[j]), v = unpack_pair<T>(y[j]);
    // A row that sees nothing has an out of zero, and its dout may be anything.
    sum += (u.x != 0.f ? u.x * v.x : 0.f) + (u.y != 0.f ? u.y * v.y : 0.f);
  }
  return sum;
}

// Over the eight lanes that have a row.
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  return sum;
}

// This lane's share of sum(out * dout) of one row; eight lanes have a row, each takes every eighth
// 16 bytes.
template <typename T, typename P>
__device__ __forceinline__ float row_delta(const P& p, int token, int head, int lane) {
  const uint4* out = reinterpret_cast<const uint4*>(
      static_cast<const T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head);
  const uint4* dout = reinterpret_cast<const uint4*>(
      static_cast<const T*>(p.dout) + token * p.dout_stride_token + head * p.dout_stride_head);
  float sum = 0.f;
  for (int i = lane; i < p.head_dim_v / 8; i += 8) {
    const uint4 a = __ldg(out + i), b = __ldg(dout + i);
    sum += chunk_delta<T>(a, b);
  }
  return sum_of_lanes(sum);
}

}  // namespace magi
