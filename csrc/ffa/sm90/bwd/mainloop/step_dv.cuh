// SPDX-License-Identifier: Apache-2.0
// A step of the pass that makes dv alone (kPasses == 2).
#pragma once

#include "ffa/sm90/bwd/mainloop/step_worker.cuh"

namespace magi {

// dv is in the first columns of `grad`. Its product is left under way, behind the next scores.
template <typename C, typename Mask>
template <int kValues>
__device__ __forceinline__ bool StepWorker<C, Mask>::step_dv(float (&grad)[kValues],
                                                             Packed& packed_p) {
  auto& dv = reinterpret_cast<float (&)[C::kDv / 2]>(grad);
  Scores s;
  start_scores(s);
  const int what = words();
  if (kOverlapDv && flags & kUnfinished) {
    wgmma_wait<1>();
    keep_in_place(dv);
    release_before(smem.do_empty(stage_before()));
  }
  wgmma_wait<0>();
  keep_in_place(s);
  exponentiate(s, packed_p, what);
  if constexpr (C::kIsGeneral)
    if (p.dropout.q_positions != nullptr) {
      const Staying<C::kBlockM> stay = staying();
#pragma unroll
      for (int i = 0; i < C::kBlockM / 4; ++i) packed_p[i] &= pair_mask(stay, 2 * i);
    }
  __syncwarp();
  if (elect_one()) mbar_arrive(smem.q_empty(ring.stage));
  release_segment(what);
  if constexpr (C::kSemaphored) {
    // The lane that adds dq counts this step, too.
    const uint32_t full = smem.dq_full(fragment());
    mbar_wait(smem.dq_empty(C::kDqFragments - 1), flags & kDsSlot ^ 1);
    __syncwarp();
    if (elect_one()) mbar_arrive(full);
    flags ^= kDsSlot;
  }
  mbar_wait(smem.do_full(ring.stage), ring.phase);
  __syncwarp();
  wgmma_fence();
  multiply_grad(dv, packed_p, smem.dout(ring.stage));
  wgmma_commit();
  if constexpr (kOverlapDv) {
    flags |= kUnfinished;
  } else {
    wgmma_wait<0>();
    keep_in_place(dv);
    if (elect_one()) mbar_arrive(smem.do_empty(ring.stage));
  }
  ring.advance();
  return !(what & kWorkTileEnds);
}

template <typename C, typename Mask>
template <int kValues>
__device__ __forceinline__ void StepWorker<C, Mask>::finish_dv(float (&dv)[kValues]) {
  wgmma_wait<0>();
  keep_in_place(dv);
  if (kOverlapDv && flags & kUnfinished) release_before(smem.do_empty(stage_before()));
  flags &= ~kUnfinished;
}

}  // namespace magi
