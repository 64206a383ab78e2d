// SPDX-License-Identifier: Apache-2.0
// The kernels before and after the main one of the backward, over the rows of queries: the first computes
// delta = sum(out * dout) and the offsets of the exponents and clears the sum of dq, or where dq is summed in order assigns the turns; the
// last rounds that sum to dq. And the one that adds up dk and dv of tiles whose heads are shared out.
#pragma once

#include "../common/copy.cuh"
#include "../common/scores.cuh"
#include "../common/barrier.cuh"
#include "bwd_config.h"
#include "bwd_params.h"
#include "bwd_split.cuh"
#include "bwd_turns.cuh"

namespace magi {

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t x);
template <>
__device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack_pair<fp16>(uint32_t x) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

// This lane's share of sum(out * dout) of one row; eight lanes have a row, each takes every eighth 16 bytes.
template <typename T>
__device__ __forceinline__ float row_delta(const BwdRowParams& p, int token, int head, int lane) {
  const uint4* out = reinterpret_cast<const uint4*>(static_cast<const T*>(p.out) + token * p.out_stride_token +
                                                    head * p.out_stride_head);
  const uint4* dout = reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout) + token * p.dout_stride_token +
                                                     head * p.dout_stride_head);
  float sum = 0.f;
  for (int i = lane; i < p.head_dim_v / 8; i += 8) {
    const uint4 a = __ldg(out + i), b = __ldg(dout + i);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = unpack_pair<T>(x[j]), v = unpack_pair<T>(y[j]);
      // A row that sees nothing has an out of zero, and its dout may be anything.
      sum += (u.x != 0.f ? u.x * v.x : 0.f) + (u.y != 0.f ? u.y * v.y : 0.f);
    }
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  return sum;
}

// One CTA per head and block of 64 queries.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 6) bwd_prepare(const BwdRowParams p) {
  const int block = blockIdx.x, head = blockIdx.y;
  const int64_t number = static_cast<int64_t>(head) * p.query_blocks + block;
  start_next_kernel();
  if (number == 0)
    for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads) p.workspace[i] = 0;
  if (p.units != nullptr && number == 0 && bwd_plan_fits(p.plan, p.total_q, p.total_k)) {
    __syncthreads();
    choose_units(p);
  }
  if (p.turn_flags != nullptr) {
    if (threadIdx.x < p.passes) p.turn_flags[number * p.passes + threadIdx.x] = 0;
    if (head == 0 && bwd_plan_fits(p.plan, p.total_q, p.total_k)) {
      wait_for_kernel_before();
      assign_turns<kRowThreads>(p, block);
    }
  }
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + number * p.dim_blocks * kDqBlockFloats);
  if (p.turn_flags == nullptr)
    for (int i = threadIdx.x; i < p.dim_blocks * kDqBlockFloats / 4; i += kRowThreads) sum[i] = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int row = threadIdx.x / 8; row < 64; row += kRowThreads / 8) {
    const int token = block * 64 + row, lane = threadIdx.x % 8;
    const int64_t at = static_cast<int64_t>(token) * p.heads_q + head;
    const bool exists = token < p.total_q;
    float delta = 0.f, offset = INFINITY;
    if (p.out != nullptr) {
      const float own = row_delta<T>(p, exists ? token : 0, head, lane);
      if (exists) delta = own;
    } else if (exists) {
      delta = p.delta[at];
    }
    if (exists) {
      const float lse = p.lse[at];
      if (lse == -INFINITY)
        delta = 0.f;  // the row sees nothing and may hold anything
      else
        offset = lse * kLog2e;
    }
    if (lane != 0) continue;
    p.stats[number * kStatFloats + row] = offset;
    p.stats[number * kStatFloats + 64 + row] = delta;
    if (exists && p.out != nullptr && p.delta != nullptr) p.delta[at] = delta;
  }
}

// One CTA per head and block of 64 queries; warpgroup i takes blocks of 64 columns i, i + 2, ...
template <typename T>
__global__ void __launch_bounds__(kRowThreads) bwd_finish(const BwdRowParams p) {
  __shared__ __align__(128) uint8_t staged[2][64 * 128];
  const int block = blockIdx.x, head = blockIdx.y, group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int lane = thread % 32, matrix = lane / 8;
  const int64_t number = static_cast<int64_t>(head) * p.query_blocks + block;
  wait_for_kernel_before();
  const float factor = bwd_plan_fits(p.plan, p.total_q, p.total_k) ? p.grad_scale : __int_as_float(0x7fffffff);
  for (int d = group; d < p.dim_blocks; d += 2) {
    const float4* sum = reinterpret_cast<const float4*>(p.dq_sum + (number * p.dim_blocks + d) * kDqBlockFloats) + thread;
    // In order the first to add stores, so where nobody did there is nothing. Counters and sums are read in L2: this CTA may have
    // been there since before they were written, with lines in its first cache that CTAs of the kernels before have left.
    const bool is_there = p.turn_flags == nullptr || load_relaxed(p.turn_flags + number * p.passes + d / (p.dim_blocks / p.passes)) > 0;
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = is_there ? __ldcg(sum + 128 * i) : make_float4(0, 0, 0, 0);
    if (p.grads_are_float) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = d * 64 + 8 * i + 2 * (lane % 4);
        if (column >= p.head_dim) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int token = block * 64 + thread / 32 * 16 + lane / 4 + 8 * r;
          if (token >= p.total_q) continue;
          float2* to = reinterpret_cast<float2*>(static_cast<float*>(p.dq) +
                                                 (static_cast<int64_t>(token) * p.heads_q + head) * p.head_dim + column);
          float2 value = r ? make_float2(x[i].z * factor, x[i].w * factor) : make_float2(x[i].x * factor, x[i].y * factor);
          if (p.accumulate) {
            value.x += to->x;
            value.y += to->y;
          }
          *to = value;
        }
      }
      continue;
    }
    const int row = thread / 32 * 16 + (matrix & 1) * 8 + lane % 8;
    const uint32_t tile = smem_addr(staged[group]);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int chunk = i + (matrix >> 1);
      store_matrix_x4(tile + row * 128 + ((chunk ^ (row & 7)) << 4), pack_pair<T>(x[i].x * factor, x[i].y * factor),
                      pack_pair<T>(x[i].z * factor, x[i].w * factor), pack_pair<T>(x[i + 1].x * factor, x[i + 1].y * factor),
                      pack_pair<T>(x[i + 1].z * factor, x[i + 1].w * factor));
    }
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = thread; i < 64 * 8; i += 128) {
      const int token = block * 64 + i / 8, column = d * 64 + i % 8 * 8;
      if (token >= p.total_q || column >= p.head_dim) continue;
      const uint4 value = *reinterpret_cast<const uint4*>(staged[group] + i / 8 * 128 + ((i % 8 ^ (i / 8 & 7)) << 4));
      *reinterpret_cast<uint4*>(static_cast<T*>(p.dq) + (static_cast<int64_t>(token) * p.heads_q + head) * p.head_dim +
                                column) = value;
    }
    named_barrier(1 + group, 128);
  }
}

// Four values of a gradient at `to_at` from their parts at `at`, in the order of the parts.
template <typename T>
__device__ __forceinline__ void join_four(const float* parts, void* grad, int64_t at, int64_t to_at, int64_t count,
                                          const BwdJoinParams& p) {
  float4 sum = *reinterpret_cast<const float4*>(parts + at);
  for (int i = 1; i < p.parts; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(parts + i * count + at);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  if (!p.grads_are_float) {
    *reinterpret_cast<uint2*>(static_cast<T*>(grad) + to_at) = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
    return;
  }
  float4* to = reinterpret_cast<float4*>(static_cast<float*>(grad) + to_at);
  if (p.accumulate) sum = make_float4(sum.x + to->x, sum.y + to->y, sum.z + to->z, sum.w + to->w);
  *to = sum;
}

// Tiles whose query heads are shared out among units leave a dk and dv for each part.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) bwd_join(const BwdJoinParams p) {
  wait_for_kernel_before();
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x);
  if (at < p.dk_count) join_four<T>(p.dk_parts, p.dk, at, at, p.dk_count, p);
  if (at < p.dv_count) join_four<T>(p.dv_parts, p.dv, at, at, p.dv_count, p);
}

// The gradient of split tiles. The parts have room for whole tiles, one for each slot.
template <typename T>
__device__ __forceinline__ void join_slots(const float* parts, void* grad, int64_t count, int row_values,
                                           const BwdSplitJoinParams& p) {
  const int64_t step = 4ll * gridDim.x * kRowThreads;
  for (int64_t at = 4ll * (blockIdx.x * kRowThreads + threadIdx.x); at < count; at += step) {
    const int row = static_cast<int>(at / row_values);  // of all slots
    const int tile = p.units[(p.split_from + row / kTileKeys) * p.heads_kv].x;  // the first parts are listed by slot
    const int64_t key = static_cast<int64_t>(tile) * kTileKeys + row % kTileKeys;
    if (key < p.total_k) join_four<T>(parts, grad, at, key * row_values + at % row_values, count, p.join);
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads) bwd_join_split(const BwdSplitJoinParams p) {
  wait_for_kernel_before();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k) || p.workspace[kSplitWord] == 0) return;
  join_slots<T>(p.join.dk_parts, p.join.dk, p.join.dk_count, p.dk_row, p);
  join_slots<T>(p.join.dv_parts, p.join.dv, p.join.dv_count, p.dv_row, p);
}

}  // namespace magi
