// SPDX-License-Identifier: Apache-2.0
// sum(out * dout) of every query head of every token, a warp for each.
#pragma once

#include "ffa/common/scores.cuh"
#include "magi/index.h"

namespace magi {

struct IndexDeltaParams {
  const uint8_t *out, *dout;
  int64_t out_token_bytes, out_head_bytes, dout_token_bytes, dout_head_bytes;
  float* delta;  // (tokens, heads)
  int32_t num_rows, heads, head_dim;
};

constexpr int kDeltaThreads = 256;

inline IndexDeltaParams index_delta_params(const magi_ffa_index_bwd_params& a) {
  IndexDeltaParams k;
  k.out = static_cast<const uint8_t*>(a.out);
  k.dout = static_cast<const uint8_t*>(a.dout);
  k.out_token_bytes = 2 * a.out_stride_token;
  k.out_head_bytes = 2 * a.out_stride_head;
  k.dout_token_bytes = 2 * a.dout_stride_token;
  k.dout_head_bytes = 2 * a.dout_stride_head;
  k.delta = a.delta;
  k.num_rows = a.total_q * a.heads_q;
  k.heads = a.heads_q;
  k.head_dim = a.head_dim_v;
  return k;
}

template <typename T>
__global__ void __launch_bounds__(kDeltaThreads) index_delta_rows(const IndexDeltaParams p) {
  const int row = blockIdx.x * (kDeltaThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.num_rows) return;
  const int token = row / p.heads, head = row - token * p.heads;
  const uint8_t* out = p.out + token * p.out_token_bytes + head * p.out_head_bytes;
  const uint8_t* dout = p.dout + token * p.dout_token_bytes + head * p.dout_head_bytes;
  float sum = 0.f;
  for (int column = 2 * lane; column < p.head_dim; column += 64) {
    const float2 a = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(out + 2 * column));
    const float2 b = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(dout + 2 * column));
    sum += a.x * b.x + a.y * b.y;
  }
#pragma unroll
  for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
  if (lane == 0) p.delta[row] = sum;
}

}  // namespace magi
