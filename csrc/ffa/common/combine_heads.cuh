// SPDX-License-Identifier: Apache-2.0
// Combines dk and dv where the query heads of all tiles are split among work tiles, each of which
// leaves a part.
#pragma once

#include "device/dependent_launch.cuh"
#include "ffa/common/scores.cuh"
#include "magi/abi.h"

namespace magi {

// The kernel that adds up the parts of dk and dv.
struct BwdCombineParams {
  const float *dk_parts, *dv_parts;
  void *dk, *dv;
  int64_t dk_count, dv_count;  // values, multiples of 8
  int32_t parts, grads_are_float, accumulate;
};

// `k` is what the main kernel was launched with.
template <typename KernelParams>
BwdCombineParams combine_params(const magi_ffa_bwd_params& a, const KernelParams& k) {
  return {static_cast<const float*>(k.dk),
          static_cast<const float*>(k.dv),
          a.dk,
          a.dv,
          k.dk_stride_part,
          k.dv_stride_part,
          k.num_head_splits,
          a.grad_dtype == MAGI_FP32,
          a.accumulate};
}

// CTAs of bwd_combine, whose threads take four values each.
inline uint32_t combine_ctas(const BwdCombineParams& c, int threads) {
  const int64_t most = c.dk_count > c.dv_count ? c.dk_count : c.dv_count;
  return static_cast<uint32_t>((most / 4 + threads - 1) / threads);
}

// Four values of a gradient at `to_at` from their parts at `at`, in the order of the parts, which
// are `count` values apart.
template <typename T>
__device__ __forceinline__ void combine_four(const float* values, int parts, int64_t at,
                                             int64_t count, void* grad, int64_t to_at,
                                             bool is_float, bool adds) {
  float4 sum = __ldcg(reinterpret_cast<const float4*>(values + at));
  for (int i = 1; i < parts; ++i) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(values + i * count + at));
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  if (!is_float) {
    *reinterpret_cast<uint2*>(static_cast<T*>(grad) + to_at) =
        make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
    return;
  }
  float4* to = reinterpret_cast<float4*>(static_cast<float*>(grad) + to_at);
  if (adds) sum = make_float4(sum.x + to->x, sum.y + to->y, sum.z + to->z, sum.w + to->w);
  *to = sum;
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_combine(const BwdCombineParams p) {
  wait_for_kernel_before();
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (at < p.dk_count)
    combine_four<T>(p.dk_parts, p.parts, at, p.dk_count, p.dk, at, p.grads_are_float, p.accumulate);
  if (at < p.dv_count)
    combine_four<T>(p.dv_parts, p.parts, at, p.dv_count, p.dv, at, p.grads_are_float, p.accumulate);
}

}  // namespace magi
