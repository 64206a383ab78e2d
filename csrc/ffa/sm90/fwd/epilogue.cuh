// SPDX-License-Identifier: Apache-2.0
// Normalises a tile's output, combines sinks and an earlier partial result, and writes out, lse and
// max_logits.
#pragma once

#include "ffa/common/out_rows.cuh"
#include "ffa/sm90/stage_rows.cuh"
#include "device/tma.cuh"
#include "ffa/sm90/fwd/config.h"
#include "ffa/sm90/fwd/params.h"
#include "ffa/common/softmax.cuh"

namespace magi {

template <typename C>
__device__ __forceinline__ void write_float_row(const FwdKernelParams& p,
                                                const float (&o)[C::kDv / 2], int r,
                                                const OutRow& row, float new_weight,
                                                float old_weight, int lane) {
  float* out =
      static_cast<float*>(p.out) + row.token * p.out_stride_token + row.head * p.out_stride_head;
#pragma unroll
  for (int j = 0; j < C::kDv / 8; ++j) {
    const int column = 8 * j + 2 * (lane % 4);
    if (column >= p.head_dim_v) continue;
    float2* at = reinterpret_cast<float2*>(out + column);
    float2 value = make_float2(o[4 * j + 2 * r] * new_weight, o[4 * j + 2 * r + 1] * new_weight);
    if (p.accumulate && old_weight > 0.f) {
      const float2 old = *at;
      value.x += old.x * old_weight;
      value.y += old.y * old_weight;
    }
    *at = value;
  }
}

template <typename C>
__device__ __forceinline__ void write_tile(const FwdKernelParams& p, uint32_t smem_out,
                                           const float (&o)[C::kDv / 2],
                                           const SoftmaxState<C>& state, int tile, int head_unit,
                                           int group) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  float weight[2], old_weight[2] = {0.f, 0.f};
  OutRow rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = out_row(p, tile, head_unit, 64 * group + 16 * warp + lane / 4 + 8 * r);
    float sum = state.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    float top = state.reference[r];
    float scale = 1.f;
    if (!C::kPlain && p.sink_count && rows[r].exists) combine_sinks(p, rows[r], &top, &sum, &scale);
    const bool empty = !(sum > 0.f);
    weight[r] = empty ? 0.f : scale / sum;
    float lse = empty ? -INFINITY : (top + log2_fast(sum)) * kLn2;
    if (!rows[r].exists) continue;
    float* lse_at = p.lse + static_cast<int64_t>(rows[r].token) * p.heads_q + rows[r].head;
    if (!C::kPlain && p.accumulate) {
      lse = joint_lse(lse, *lse_at, weight[r], old_weight[r]);
      __syncwarp(0xfu << (lane & ~3));  // all four threads of the row have read the old value
    }
    if (lane % 4 == 0) {
      *lse_at = lse;
      if (p.max_logits != nullptr && state.reference[r] != -INFINITY)
        atomic_max_float(p.max_logits + rows[r].head, state.reference[r] * kLn2);
    }
  }
  named_barrier(1 + group, 128);  // all warps are through with Q: the output is staged there, or Q
                                  // is released after this
  if (!C::kPlain && p.out_is_float) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (rows[r].exists) write_float_row<C>(p, o, r, rows[r], weight[r], old_weight[r], lane);
    return;
  }
  stage_rows<typename C::T, C::kDv, C::kBlockM>(smem_out, o, weight, warp, lane);
  fence_async_proxy();
  named_barrier(1 + group, 128);
  if (thread == 0) {
    const int token = tile * p.tile_tokens + group * (64 / p.pack);
    if (token < p.total_q) {
#pragma unroll
      for (int d = 0; d < C::kAtomsV; ++d)
        store_tile_4d(&p.out_map, smem_out + d * (C::kBlockM * 128), d * 64, 0, token, head_unit);
    }
    store_commit();
  }
}

}  // namespace magi
