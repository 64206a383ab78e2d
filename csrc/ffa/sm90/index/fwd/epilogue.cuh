// SPDX-License-Identifier: Apache-2.0
// Normalises the output of a list's query heads and writes out and lse.
#pragma once

#include "ffa/common/softmax.cuh"
#include "ffa/sm90/index/fwd/config.h"
#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/stage_rows.cuh"
#include "ffa/sm90/tma.cuh"

namespace magi {

// `smem_out`: the warpgroup's rows of Q, which nobody reads any more.
template <typename C>
__device__ __forceinline__ void write_heads(const IndexFwdParams& p, uint32_t smem_out,
                                            const float (&o)[C::kDv / 2],
                                            const SoftmaxState<C>& state, int token, int kv_head,
                                            int group) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  float weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_group = 64 * group + 16 * warp + lane / 4 + 8 * r;
    float sum = state.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const bool empty = !(sum > 0.f);
    weight[r] = empty ? 0.f : 1.f / sum;
    if (in_group < p.group && lane % 4 == 0)
      p.lse[static_cast<int64_t>(token) * p.heads_q + kv_head * p.group + in_group] =
          empty ? -INFINITY : (state.reference[r] + log2_fast(sum)) * kLn2;
  }
  named_barrier(1 + group, 128);  // all warps are through with Q
  stage_rows<typename C::T, C::kDv, C::kBlockM>(smem_out, o, weight, warp, lane);
  fence_async_proxy();
  named_barrier(1 + group, 128);
  if (thread == 0) {
    if (64 * group < p.group) {
#pragma unroll
      for (int d = 0; d < C::kDv / 64; ++d)
        store_tile_4d(&p.out_map, smem_out + d * (C::kBlockM * 128), d * 64, 64 * group, kv_head,
                      token);
    }
    store_commit();
  }
}

}  // namespace magi
