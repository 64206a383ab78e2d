// SPDX-License-Identifier: Apache-2.0
// Normalises the output of the rows of a work item and writes out and lse.
#pragma once

#include "device/shared.cuh"
#include "ffa/common/softmax.cuh"
#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/index/mla/fwd/smem.cuh"
#include "ffa/sm90/index/mla/work_item.cuh"
#include "ffa/sm90/stage_rows.cuh"
#include "device/tma.cuh"

namespace magi {

constexpr int kOneGroup = 1;  // named barriers: of the first warpgroup or the second

// The columns of one warpgroup. Both have the same references, and sums of their own blocks. They
// meet by an mbarrier, since each has code of its own and compute-sanitizer takes a named barrier
// at one place of the code only. `phase`: of the item.
template <typename C>
__device__ __forceinline__ void write_latent_rows(const IndexFwdParams& p,
                                                  const MlaFwdSmem<C>& smem,
                                                  const float (&o)[C::kDv / 2],
                                                  const SoftmaxState<C>& state,
                                                  const WorkItem& item, int group, uint32_t phase) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4;
  float sum[2], weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = state.sum[r];
    sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 2);
    if (lane % 4 == 0) sts_int(smem.sums(group) + 4 * (row + 8 * r), __float_as_int(sum[r]));
  }
  __syncwarp();
  if (elect_one()) mbar_arrive(smem.sums_full());
  mbar_wait(smem.sums_full(), phase);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float other = __int_as_float(lds_int(smem.sums(group ^ 1) + 4 * (row + 8 * r)));
    const float even = group == 0 ? sum[r] : other, odd = group == 0 ? other : sum[r];
    const float total = even + odd;
    const QueryRow query = query_row(p.work, item.tile, item.half, row + 8 * r);
    const bool empty = !(total > 0.f);
    weight[r] = empty || !query.exists ? 0.f : 1.f / total;  // unused rows stay zeros
    if (group == 0 && query.exists && lane % 4 == 0)
      p.lse[static_cast<int64_t>(query.token) * p.work.heads_q + query.head] =
          empty ? -INFINITY : (state.reference[r] + log2_fast(total)) * kLn2;
  }
  const int first = C::part_begin(group);
  stage_rows<typename C::T, C::kDv, C::kBlockM>(smem.q() + first * C::kAtomBytes, o, weight, warp,
                                                lane);
  fence_async_proxy();
  named_barrier(kOneGroup + group, 128);
  if (thread == 0) {
    if (item.head < p.work.group && item.token < p.work.total_q) {
#pragma unroll
      for (int atom = first; atom < first + C::kDv / 64; ++atom)
        store_tile_4d(&p.out_map, smem.q() + atom * C::kAtomBytes, atom * 64, item.head, item.token,
                      item.tile.kv_head);
    }
    store_commit();
    store_wait_read();
    mbar_arrive(smem.q_empty());
  }
}

}  // namespace magi
