// SPDX-License-Identifier: Apache-2.0
// Normalises the output of the rows of a tile and writes out and lse.
#pragma once

#include "ffa/common/softmax.cuh"
#include "ffa/sm90/index/fwd/config.h"
#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/stage_rows.cuh"
#include "device/tma.cuh"

namespace magi {

// `smem_out`: the warpgroup's rows of Q, which nobody reads any more.
template <typename C>
__device__ __forceinline__ void write_rows(const IndexFwdParams& p, uint32_t smem_out,
                                           const float (&o)[C::kDv / 2],
                                           const SoftmaxState<C>& state, const WorkTile& tile,
                                           int group) {
  const WorkTiles& w = p.work;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  float weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const QueryRow row = query_row(w, tile, group, 16 * warp + lane / 4 + 8 * r);
    float sum = state.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const bool empty = !(sum > 0.f);
    weight[r] = empty || !row.exists ? 0.f : 1.f / sum;  // unused rows stay zeros
    if (row.exists && lane % 4 == 0)
      p.lse[static_cast<int64_t>(row.token) * w.heads_q + row.head] =
          empty ? -INFINITY : (state.reference[r] + log2_fast(sum)) * kLn2;
  }
  named_barrier(1 + group, 128);  // all warps are through with Q
  stage_rows<typename C::T, C::kDv, C::kBlockM>(smem_out, o, weight, warp, lane);
  fence_async_proxy();
  named_barrier(1 + group, 128);
  if (thread == 0) {
    const int head = group * w.head_step, token = tile.token + group * w.token_step;
    if (head < w.group && token < w.total_q) {
#pragma unroll
      for (int d = 0; d < C::kDv / 64; ++d)
        store_tile_4d(&p.out_map, smem_out + d * (C::kBlockM * 128), d * 64, head, token,
                      tile.kv_head);
    }
    store_commit();
  }
}

}  // namespace magi
