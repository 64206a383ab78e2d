// SPDX-License-Identifier: Apache-2.0
// The last kernel of the backward, over the rows of queries: it rounds the dq accumulator, or adds
// it to what is there.
#pragma once

#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/rows/dq_layout.cuh"

namespace magi {

template <int kBlockM>
__device__ __forceinline__ void write_float_dq(const BwdRowParams& p,
                                               const float4 (&x)[DqChunk<kBlockM>::kCount],
                                               float factor, int first_query, int head,
                                               int first_column, int thread) {
  const int64_t row_values = static_cast<int64_t>(p.heads_q) * p.head_dim;
#pragma unroll
  for (int i = 0; i < DqChunk<kBlockM>::kCount; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 place = DqChunk<kBlockM>::query_and_column(thread, i, r);
      const int token = first_query + place.x, column = first_column + place.y;
      if (token >= p.total_q || column >= p.head_dim) continue;
      float* to = static_cast<float*>(p.dq) + token * row_values + head * p.head_dim + column;
      float2 value = r ? make_float2(x[i].z * factor, x[i].w * factor)
                       : make_float2(x[i].x * factor, x[i].y * factor);
      if constexpr (DqChunk<kBlockM>::kIsTransposed) {
        *to = p.accumulate ? *to + value.x : value.x;
        if (token + 1 < p.total_q)
          to[row_values] = p.accumulate ? to[row_values] + value.y : value.y;
      } else {
        float2* pair = reinterpret_cast<float2*>(to);
        *pair = p.accumulate ? make_float2(pair->x + value.x, pair->y + value.y) : value;
      }
    }
  }
}

// 64 columns of a block of one head, by the warpgroup that has `staged`; its threads do `meanwhile`
// when the sum is on its way, which is zero unless it `is_there`. Sums are read in L2: this CTA may
// have been there since before they were written, with lines in its first cache that CTAs of the
// kernels before have left.
template <typename T, int kBlockM, typename Meanwhile>
__device__ __forceinline__ void postprocess_columns(const BwdRowParams& p,
                                                    uint8_t (&staged)[kBlockM * 128], int block,
                                                    int head, int d, bool is_there, float factor,
                                                    Meanwhile meanwhile) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int64_t number = static_cast<int64_t>(head) * p.num_m_blocks + block;
  const float4* sum = reinterpret_cast<const float4*>(p.dq_accum + (number * p.dim_blocks + d) *
                                                                       dq_block_floats(kBlockM)) +
                      thread;
  float4 x[DqChunk<kBlockM>::kCount];
#pragma unroll
  for (int i = 0; i < DqChunk<kBlockM>::kCount; ++i)
    x[i] = is_there ? __ldcg(sum + 128 * i) : make_float4(0, 0, 0, 0);
  meanwhile();
  if (p.grads_are_float) {
    write_float_dq<kBlockM>(p, x, factor, block * kBlockM, head, d * 64, thread);
    return;
  }
  stage_dq<T, kBlockM, DqChunk<kBlockM>::kCount>(
      smem_addr(staged), [&](int i) { return x[i]; }, factor, thread);
  named_barrier(1 + group, 128);
#pragma unroll
  for (int i = thread; i < kBlockM * 8; i += 128) {
    const int token = block * kBlockM + i / 8, column = d * 64 + i % 8 * 8;
    if (token >= p.total_q || column >= p.head_dim) continue;
    const uint4 value =
        *reinterpret_cast<const uint4*>(staged + i / 8 * 128 + ((i % 8 ^ (i / 8 & 7)) << 4));
    *reinterpret_cast<uint4*>(static_cast<T*>(p.dq) +
                              (static_cast<int64_t>(token) * p.heads_q + head) * p.head_dim +
                              column) = value;
  }
  named_barrier(1 + group, 128);
}

// A block of one head, by a CTA; warpgroup i takes blocks of 64 columns i, i + 2, ... All threads
// do `meanwhile` once, when the first of them are on their way.
template <typename T, int kBlockM, typename Meanwhile>
__device__ __forceinline__ void postprocess_block(const BwdRowParams& p, int block, int head,
                                                  float factor, Meanwhile meanwhile) {
  __shared__ __align__(128) uint8_t staged[2][kBlockM * 128];
  const int group = threadIdx.x / 128;
  for (int d = group; d < p.dim_blocks; d += 2)
    postprocess_columns<T, kBlockM>(p, staged[group], block, head, d, true, factor, [&] {
      if (d == group) meanwhile();
    });
}

// One CTA per head and block of queries.
template <typename T, int kBlockM>
__global__ void __launch_bounds__(kRowThreads, 3) bwd_postprocess(const BwdRowParams p) {
  wait_for_kernel_before();
  const float factor =
      bwd_plan_fits(p.plan, p.total_q, p.total_k) ? p.grad_scale : __int_as_float(0x7fffffff);
  postprocess_block<T, kBlockM>(p, blockIdx.x, blockIdx.y, factor, [] {});
  if (blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y) rank_barrier(p.barrier);
}

}  // namespace magi
