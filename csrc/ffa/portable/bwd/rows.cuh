// SPDX-License-Identifier: Apache-2.0
// The kernels before and after the main one of the backward, over the rows of queries: delta and
// the offsets of the exponents; and dq from its sum.
#pragma once

#include "ffa/common/row_delta.cuh"
#include "ffa/portable/bwd/config.h"
#include "ffa/portable/bwd/params.h"
#include "ffa/portable/plan_reader.cuh"

namespace magi::portable {

constexpr int kRowThreads = 256;

// Where value i of a lane's fragment of four lies among the 128 of its warp: so that what a warp
// adds at once is contiguous.
__device__ __forceinline__ int dq_slot(int lane, int i) {
#if __CUDA_ARCH__ >= 900
  return 4 * lane + i;  // added four at a time
#else
  return 32 * i + lane;
#endif
}

// One CTA per block of queries and head.
template <typename C>
__global__ void __launch_bounds__(kRowThreads)
    bwd_preprocess(const __grid_constant__ BwdKernelParams p) {
  const int block = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 8;
  float* stats = p.stats + (static_cast<int64_t>(head) * p.num_m_blocks + block) * 2 * C::kBlockM;
  for (int row = threadIdx.x / 8; row < C::kBlockM; row += kRowThreads / 8) {
    const int token = block * C::kBlockM + row;
    const int64_t at = static_cast<int64_t>(token) * p.heads_q + head;
    const bool exists = token < p.total_q;
    float delta = 0.f;
    if (p.out != nullptr)
      delta = row_delta<typename C::T>(p, exists ? token : 0, head, lane);
    else if (exists)
      delta = p.delta[at];
    const float lse = exists ? p.lse[at] : -INFINITY;
    if (lane != 0) continue;
    const bool is_seen = exists && lse != -INFINITY;  // a row that sees nothing may hold anything
    delta = is_seen ? delta : 0.f;
    stats[row] = is_seen ? lse * kLog2e - p.dropout_log2_scale : INFINITY;
    stats[C::kBlockM + row] = delta * p.dropout_inverse_scale;
    if (exists && p.out != nullptr && p.delta != nullptr) p.delta[at] = delta;
  }
}

// Two neighbouring values of dq.
template <typename T>
__device__ __forceinline__ void write_pair(void* to, int64_t at, float2 value, bool is_float,
                                           bool adds) {
  if (!is_float) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(to) + at) = pack_pair<T>(value.x, value.y);
    return;
  }
  float2* pair = reinterpret_cast<float2*>(static_cast<float*>(to) + at);
  if (adds) value = make_float2(value.x + pair->x, value.y + pair->y);
  *pair = value;
}

// One CTA per block of queries and head, with the threads of the main kernel.
template <typename C>
__global__ void __launch_bounds__(C::kThreads)
    bwd_postprocess(const __grid_constant__ BwdKernelParams p) {
  const int block = blockIdx.x, head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool fits = PlanReader{p.plan}.fits(p.total_k, p.total_q, C::kBlockN, C::kGroups);
  constexpr int kFragments = C::kDqAtoms * (C::kDqColumns / 8);
  const float* sum =
      p.dq_accum +
      ((static_cast<int64_t>(head) * p.num_m_blocks + block) * C::kWarps + warp) * kFragments * 128;
  const int row0 = block * C::kBlockM + warp % C::kDqRowWarps * (16 * C::kDqAtoms) + lane / 4;
  const int column0 = warp / C::kDqRowWarps * C::kDqColumns + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int row = row0 + i / (C::kDqColumns / 8) * 16;
    const int column = column0 + i % (C::kDqColumns / 8) * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* from = sum + i * 128;
      const float nan = __int_as_float(0x7fffffff);
      float2 value = make_float2(from[dq_slot(lane, 2 * r)] * p.grad_scale,
                                 from[dq_slot(lane, 2 * r + 1)] * p.grad_scale);
      if (!fits) value = make_float2(nan, nan);
      if (row + 8 * r >= p.total_q || column >= p.head_dim) continue;
      const int64_t at =
          (static_cast<int64_t>(row + 8 * r) * p.heads_q + head) * p.head_dim + column;
      write_pair<typename C::T>(p.dq, at, value, p.dq_is_float, p.dq_accumulate);
    }
  }
}

}  // namespace magi::portable
