// SPDX-License-Identifier: Apache-2.0
// A step of 64 queries that makes dk and dq, and dv unless that has a pass of its own.
#pragma once

#include "ffa/sm90/bwd/mainloop/step_worker.cuh"

namespace magi {

// The multiplication for dK is left under way with kOverlapDk; it ends in the next step, or in
// `finish`. With two passes dv is left to the other.
template <typename C, typename Mask>
template <typename Dk, typename Dv>
__device__ __forceinline__ bool StepWorker<C, Mask>::step(Dk& dk, Dv& dv, DqRest& rest,
                                                          uint32_t& rest_of) {
  constexpr bool kMakesDv = C::kPasses == 1;
  Scores s, dp;
  Packed packed_p, packed_ds;
  start_scores(s);
  int what = 0;
  if constexpr (kScoresFirst) {
    what = words();
    scores_are_there(s);
  }
  if (kMaskFirst && what & kMasked) mask(s, what);
  start_dp(dp);
  if constexpr (C::kDirectDq) {
    columns().add_rest(rest, rest_of);
    rest_of = dq_block();
  }
  if constexpr (!kScoresFirst) {
    what = words();
    scores_are_there(s);
  }
  exponentiate<kRoundsP>(s, packed_p, what);
  Staying<C::kBlockM> stay;
  if constexpr (C::kIsGeneral && kMakesDv)
    if (p.dropout.q_positions != nullptr) {
      stay = staying();
#pragma unroll
      for (int i = 0; i < C::kBlockM / 4; ++i) packed_p[i] &= pair_mask(stay, 2 * i);
    }
  if constexpr (kMakesDv) {
    wgmma_fence();
    multiply_grad(dv, packed_p, smem.dout(ring.stage));
    wgmma_commit();
  }
  float2 deltas[kEarlyDeltas + 1];
#pragma unroll
  for (int j = 0; j < kEarlyDeltas; ++j) deltas[j] = lds_float2(deltas_at() + C::stat_at(8 * j));
  wgmma_wait<kMakesDv>();
  keep_in_place(dp);
  if (!kMakesDv && elect_one()) mbar_arrive(smem.do_empty(ring.stage));
  if constexpr (C::kIsGeneral)
    if (p.dropout.q_positions != nullptr) {
      if constexpr (!kMakesDv) stay = staying();
#pragma unroll
      for (int i = 0; i < C::kBlockM / 2; ++i) dp[i] = stay.has(i) ? dp[i] : 0.f;
    }
  if constexpr (kRoundsP)
    score_grads<C>(packed_p, dp, deltas_at(), packed_ds);
  else
    score_grads_of_factors<C, kEarlyDeltas>(s, dp, deltas, deltas_at(), packed_ds);
  if constexpr (kEarlyDk > 0) {
    wgmma_fence();
    multiply_grad<0, kEarlyDk>(dk, packed_ds, smem.q(ring.stage));
    wgmma_commit();
  }
  if constexpr (C::kDqOverDs) mbar_wait(smem.dq_empty(C::kDqFragments - 1), flags & kDsSlot ^ 1);
  if constexpr (C::kHasDsEmpty) mbar_wait(smem.ds_empty(), flags & kDsSlot ^ 1);
  const uint32_t ds = smem.ds(flags & kDsSlot);
  store_ds<C>(packed_ds, ds);
  fence_async_proxy();
  if constexpr (kDkFirst) {
    wgmma_wait<0>();
    keep_in_place(dk);
    if (elect_one()) mbar_arrive(smem.q_empty(ring.stage));
    release_segment(what);
  }
  named_barrier(kDsBarrier, 128 * C::kGroups);
  Dq dq;
  wgmma_fence();
  columns().multiply(dq, ds);
  wgmma_commit();
  if constexpr (!kDkFirst) {
    multiply_grad<kEarlyDk>(dk, packed_ds, smem.q(ring.stage));
    wgmma_commit();
  }
  wgmma_wait<!kDkFirst>();
  keep_in_place(dq);
  if (kMakesDv && elect_one()) mbar_arrive(smem.do_empty(ring.stage));
  if (C::kHasDsEmpty && elect_one()) mbar_arrive(smem.ds_empty());
  if constexpr (C::kDirectDq)
    columns().add_now(dq, rest, rest_of);
  else
    hand_over_dq(dq, what);
  if constexpr (!kDkFirst) release_segment(what);
  if constexpr (!kOverlapDk && !kDkFirst) {
    wgmma_wait<0>();
    keep_in_place(dk);
    if constexpr (kMakesDv) keep_in_place(dv);
    if (elect_one()) mbar_arrive(smem.q_empty(ring.stage));
  }
  ring.advance();
  flags ^= kDsSlot;
  if constexpr (kOverlapDk) flags |= kUnfinished;
  return !(what & kWorkTileEnds);
}

}  // namespace magi
