// SPDX-License-Identifier: Apache-2.0
// Normalises a tile's output, combines sinks and an earlier partial result, and writes out, lse and
// max_logits. A warp writes the rows that it computed, so warps need not wait for each other.
#pragma once

#include "ffa/common/out_rows.cuh"
#include "device/shared.cuh"
#include "ffa/common/softmax.cuh"
#include "ffa/portable/copy.cuh"
#include "ffa/portable/fwd/config.h"
#include "ffa/portable/fwd/params.h"

namespace magi::portable {

struct RowWeights {
  float now[2], before[2];  // of this result and of what is there already
};

// lse and max_logits of the two rows of an atom; the weights of their outputs.
template <typename C>
__device__ __forceinline__ RowWeights finish_rows(const FwdKernelParams& p,
                                                  const SoftmaxState<C>& state,
                                                  const OutRow (&rows)[2], int lane) {
  RowWeights w = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    float top = state.reference[r], scale = 1.f;
    if (p.sink_count && rows[r].exists) combine_sinks(p, rows[r], &top, &sum, &scale);
    const bool empty = !(sum > 0.f);
    w.now[r] = empty ? 0.f : scale / sum;
    float lse = empty ? -INFINITY : (top + log2_fast(sum)) * kLn2;
    if (!rows[r].exists) continue;
    float* lse_at = p.lse + static_cast<int64_t>(rows[r].token) * p.heads_q + rows[r].head;
    if (p.accumulate) {
      lse = joint_lse(lse, *lse_at, w.now[r], w.before[r]);
      __syncwarp(0xfu << (lane & ~3));  // all four threads of the row have read the old value
    }
    if (lane % 4 == 0) {
      *lse_at = lse;
      if (p.max_logits != nullptr && state.reference[r] != -INFINITY)
        atomic_max_float(p.max_logits + rows[r].head, state.reference[r] * kLn2);
    }
  }
  return w;
}

template <typename C>
__device__ __forceinline__ void write_float_rows(const FwdKernelParams& p,
                                                 const float (&o)[C::kDv / 2],
                                                 const OutRow (&rows)[2], const RowWeights& w,
                                                 int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows[r].exists) continue;
    float* out = static_cast<float*>(p.out) + rows[r].token * p.out_stride_token +
                 rows[r].head * p.out_stride_head;
#pragma unroll
    for (int j = 0; j < C::kDv / 8; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      if (column >= p.head_dim_v) continue;
      float2* at = reinterpret_cast<float2*>(out + column);
      float2 value = make_float2(o[4 * j + 2 * r] * w.now[r], o[4 * j + 2 * r + 1] * w.now[r]);
      if (p.accumulate && w.before[r] > 0.f) {
        const float2 old = *at;
        value.x += old.x * w.before[r];
        value.y += old.y * w.before[r];
      }
      *at = value;
    }
  }
}

// One lane's 16 bytes of a row at a time, out of shared memory.
template <typename C>
__device__ __forceinline__ void write_staged_rows(const FwdKernelParams& p, uint32_t smem, int tile,
                                                  int head_unit, int row0, int lane) {
  using T = typename C::T;
  for (int i = lane; i < C::kRowsPerWarp * (C::kDv / 8); i += 32) {
    const int row = row0 + i / (C::kDv / 8), chunk = i % (C::kDv / 8);
    const OutRow at = out_row(p, tile, head_unit, row);
    if (!at.exists || 8 * chunk >= p.head_dim_v) continue;
    const uint4 words =
        lds_uint4(smem + chunk / 8 * (C::kBlockM * 128) + chunk_at<128>(row, chunk % 8));
    T* out = static_cast<T*>(p.out) + at.token * p.out_stride_token + at.head * p.out_stride_head;
    *reinterpret_cast<uint4*>(out + 8 * chunk) = words;
  }
}

template <typename C>
__device__ __forceinline__ void write_tile(const FwdKernelParams& p, uint32_t smem,
                                           const float (&o)[C::kAtoms][C::kDv / 2],
                                           const SoftmaxState<C> (&state)[C::kAtoms], int tile,
                                           int head_unit) {
  using T = typename C::T;
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * C::kRowsPerWarp;
#pragma unroll
  for (int atom = 0; atom < C::kAtoms; ++atom) {
    OutRow rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows[r] = out_row(p, tile, head_unit, row0 + 16 * atom + lane / 4 + 8 * r);
    const RowWeights w = finish_rows<C>(p, state[atom], rows, lane);
    if (p.out_is_float) {
      write_float_rows<C>(p, o[atom], rows, w, lane);
      continue;
    }
#pragma unroll
    for (int j = 0; j < C::kDv / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * atom + lane / 4 + 8 * r;
        sts_int(
            smem + j / 8 * (C::kBlockM * 128) + chunk_at<128>(row, j % 8) + 4 * (lane % 4),
            pack_pair<T>(o[atom][4 * j + 2 * r] * w.now[r], o[atom][4 * j + 2 * r + 1] * w.now[r]));
      }
  }
  if (p.out_is_float) return;
  __syncwarp();
  write_staged_rows<C>(p, smem, tile, head_unit, row0, lane);
}

}  // namespace magi::portable
