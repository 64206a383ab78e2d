// SPDX-License-Identifier: Apache-2.0
// Rows of the output: where they lie, sinks that are merged into them, and what is written where a
// plan does not fit. P is what a forward kernel is launched with.
#pragma once

#include "ffa/common/scores.cuh"

namespace magi {

// Largest value over all threads of all CTAs; works for any sign.
__device__ __forceinline__ void atomic_max_float(float* address, float value) {
  if (!signbit(value))
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
}

// The lse of a row with what `old` is of; fits the weights of the new output and of the old one.
__device__ __forceinline__ float joint_lse(float lse, float old, float& weight, float& old_weight) {
  const float high = fmaxf(lse, old);
  if (high == -INFINITY) return lse;
  const float joint =
      high + log2_fast(exp2_fast((lse - high) * kLog2e) + exp2_fast((old - high) * kLog2e)) * kLn2;
  weight *= exp2_fast((lse - joint) * kLog2e);
  old_weight = exp2_fast((old - joint) * kLog2e);
  return joint;
}

// For a plan that did not fit into its buffer, or belongs to other shapes: an output and lse that
// nobody can mistake for right ones.
template <typename C, typename P>
__device__ void write_nan(const P& p) {
  const float nan = __int_as_float(0x7fffffff);
  for (int token = blockIdx.x; token < p.total_q; token += gridDim.x) {
    for (int i = threadIdx.x; i < p.heads_q * p.head_dim_v; i += C::kThreads) {
      const int64_t at =
          token * p.out_stride_token + (i / p.head_dim_v) * p.out_stride_head + i % p.head_dim_v;
      if (p.out_is_float)
        static_cast<float*>(p.out)[at] = nan;
      else
        static_cast<typename C::T*>(p.out)[at] = typename C::T(nan);
    }
    for (int h = threadIdx.x; h < p.heads_q; h += C::kThreads)
      p.lse[static_cast<int64_t>(token) * p.heads_q + h] = nan;
  }
}

// One row of a tile as an output position.
struct OutRow {
  int token, head;
  bool exists;
};

template <typename P>
__device__ __forceinline__ OutRow out_row(const P& p, int tile, int head_unit, int row) {
  const int in_tile = row / p.pack;
  OutRow r;
  r.token = tile * p.tile_tokens + in_tile;
  r.head = head_unit * p.pack + row - in_tile * p.pack;
  r.exists = r.token < p.total_q;
  return r;
}

// Adds the mass of the sinks: base-2 exponents relative to `top`, which may grow.
template <typename P>
__device__ __forceinline__ void combine_sinks(const P& p, const OutRow& row, float* top, float* sum,
                                              float* scale) {
  const int64_t first = p.sink_per_row
                            ? static_cast<int64_t>(row.token) * p.sink_count * p.heads_q + row.head
                            : row.head;
  float highest = *top;
#pragma unroll 1
  for (int i = 0; i < p.sink_count; ++i)
    highest = fmaxf(highest, p.sink[first + static_cast<int64_t>(i) * p.heads_q] * kLog2e);
  if (highest == -INFINITY) return;
  const float factor = *top == -INFINITY ? 0.f : exp2_fast(*top - highest);
  *sum *= factor;
  *scale *= factor;
  *top = highest;
#pragma unroll 1
  for (int i = 0; i < p.sink_count; ++i)
    *sum += exp2_fast(p.sink[first + static_cast<int64_t>(i) * p.heads_q] * kLog2e - highest);
}

}  // namespace magi
