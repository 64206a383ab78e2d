// SPDX-License-Identifier: Apache-2.0
// A step of 80 or 128 queries (kIsWide). Larger m-blocks have more arithmetic for each wait, and K
// and V are read from shared memory less often for each query. In blocks of 80 dq is transposed
// too, because rows come by 64; blocks of 128 have 64 rows for each warpgroup. Registers have no
// room for scores in float32 beside P: dS is made from P as it was rounded.
#pragma once

#include "ffa/sm90/bwd/mainloop/step_worker.cuh"

namespace magi {

// Q of the step is there, and `keys` are this warpgroup's rows of K. Whatever the step needs to
// look up or to wait for is asked for while products are made: between them the tensor cores would
// be idle. For the same reason a share of dq is announced in the next step, or in `finish`: the
// fence ahead of that waits for the stores, some 270 clocks while dK is made.
template <typename C, typename Mask>
__device__ __forceinline__ bool StepWorker<C, Mask>::step_wide(Grad<C::kD>& dk, Grad<C::kDv>& dv,
                                                               uint32_t& keys) {
  Scores s, dp;
  Packed packed_p, packed_ds;
  wgmma_fence();
  multiply_rows<C::kD>(s, keys, smem.q(ring.stage));
  wgmma_commit();
  if (flags & kUnfinished) announce_dq();
  const int what = words();
  const uint32_t values = rows_of(smem.v());
  mbar_wait(smem.do_full(ring.stage), ring.phase);
  __syncwarp();
  scores_are_there(s);
  if (what & kMasked) mask(s, what);
  wgmma_fence();
  multiply_rows<C::kDv>(dp, values, smem.dout(ring.stage));
  wgmma_commit();
  exponentiate(s, packed_p, what);
  DeltasOf<C> deltas;
  if constexpr (kLoadsDeltasEarly) {
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j)
      deltas[j] = lds_float2(deltas_at() + C::stat_at(8 * j));
  }
  wgmma_fence();
  multiply_grad(dv, packed_p, smem.dout(ring.stage));
  wgmma_commit();
  wgmma_wait<1>();
  keep_in_place(dp);
  if constexpr (kLoadsDeltasEarly)
    score_grads<C>(packed_p, dp, deltas, packed_ds);
  else
    score_grads<C>(packed_p, dp, deltas_at(), packed_ds);
  wgmma_fence();
  multiply_grad<0, kEarlyDk>(dk, packed_ds, smem.q(ring.stage));
  wgmma_commit();
  mbar_wait(smem.ds_empty(), flags & kDsSlot ^ 1);
  store_ds<C>(packed_ds, smem.ds(0));
  fence_async_proxy();
  named_barrier(kDsBarrier, 128 * C::kGroups);
  Dq dq;
  wgmma_fence();
  columns().multiply(dq, smem.ds(0));
  wgmma_commit();
  multiply_grad<kEarlyDk>(dk, packed_ds, smem.q(ring.stage));
  wgmma_commit();
  const uint32_t part = fragment(),
                 number = C::kDqFragments == 2
                              ? dq_block() | (what & kWorkTileEnds ? kLastFragments : 0)
                              : 0;
  mbar_wait(smem.dq_empty(part), flags & kDsSlot ^ 1);
  __syncwarp();
  wgmma_wait<1>();
  keep_in_place(dq);
  if (elect_one()) mbar_arrive(smem.do_empty(ring.stage));
  if (elect_one()) mbar_arrive(smem.ds_empty());
  columns().leave(dq, what);
  if (C::kDqFragments == 2 && elect_one()) sts_int(smem.dq_number(part), number);
  release_segment(what);
  const uint32_t slot = ring.stage;
  ring.advance();
  flags = (flags | kUnfinished) ^ kDsSlot;
  if (!(what & kWorkTileEnds)) mbar_wait(smem.q_full(ring.stage), ring.phase);
  __syncwarp();
  keys = rows_of(smem.k());  // anew, which takes no register all the while
  wgmma_wait<0>();
  keep_in_place(dk);
  keep_in_place(dv);
  if (elect_one()) mbar_arrive(smem.q_empty(slot));
  return !(what & kWorkTileEnds);
}

}  // namespace magi
