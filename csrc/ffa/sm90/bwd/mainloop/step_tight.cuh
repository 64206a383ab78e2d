// SPDX-License-Identifier: Apache-2.0
// A step of 64 queries where dk and dv leave registers for one more product at a time (kIsTight).
#pragma once

#include "ffa/sm90/bwd/mainloop/step_worker.cuh"

namespace magi {

// Scores become P before dP is asked for, and dK is there before dq is.
template <typename C, typename Mask>
__device__ __forceinline__ bool StepWorker<C, Mask>::step_tight(Grad<C::kD>& dk, Grad<C::kDv>& dv) {
  Packed packed_p, packed_ds;
  Scores s;
  start_scores(s);
  const int what = words();
  const uint32_t number = C::kDirectDq ? dq_block() : 0;
  wgmma_wait<0>();
  keep_in_place(s);
  if (what & kMasked) mask(s, what);
  exponentiate(s, packed_p, what);
  Scores dp;
  start_dp(dp);
  multiply_grad(dv, packed_p, smem.dout(ring.stage));
  wgmma_commit();
  wgmma_wait<1>();
  keep_in_place(dp);
  score_grads<C>(packed_p, dp, deltas_at(), packed_ds);
  wgmma_fence();
  multiply_grad(dk, packed_ds, smem.q(ring.stage));
  wgmma_commit();
  if constexpr (C::kDqOverDs) mbar_wait(smem.dq_empty(C::kDqFragments - 1), flags & kDsSlot ^ 1);
  const uint32_t ds = smem.ds(flags & kDsSlot);
  store_ds<C>(packed_ds, ds);
  fence_async_proxy();
  wgmma_wait<0>();
  keep_in_place(dk);
  keep_in_place(dv);
  if (elect_one()) mbar_arrive(smem.do_empty(ring.stage));
  if (elect_one()) mbar_arrive(smem.q_empty(ring.stage));
  release_segment(what);
  named_barrier(kDsBarrier, 128 * C::kGroups);
  Dq dq;
  wgmma_fence();
  columns().multiply(dq, ds);
  wgmma_commit();
  wgmma_wait<0>();
  keep_in_place(dq);
  if constexpr (C::kDirectDq) {
    DqRest none;
    columns().add_now(dq, none, number);
  } else {
    hand_over_dq(dq, what);
  }
  ring.advance();
  flags ^= kDsSlot;
  return !(what & kWorkTileEnds);
}

}  // namespace magi
