// SPDX-License-Identifier: Apache-2.0
// A step of the key-stationary backward: that of the dense backward with a mask by granules, or
// less of it where no key of a warpgroup sees the queries.
#pragma once

#include "ffa/sm90/bwd/mainloop/step.cuh"
#include "ffa/sm90/index/bwd/keys/producer.cuh"

namespace magi {

// A warp's 16 keys see all queries of a step or none; and the tile's keys may end. `kHasHalves`:
// see ListedStepWorker.
template <typename C, bool kHasHalves>
struct GranuleMask {
  // Where a step may be another one, ptxas finds too few registers to keep dK under way.
  static constexpr bool kLetsDkOverlap = !kHasHalves;
  static __device__ __forceinline__ void apply(const BwdSmem<C>& smem, uint32_t stage, int what,
                                               float (&s)[C::kBlockM / 2]) {
    const int warp = thread_again() / 32 - 4, row = warp * kGranule + thread_again() % 32 / 4;
    const int keys =
        what >> (kGranuleBit + warp % kGranulesOfWarpgroup) & 1 ? lds_int(smem.step(stage) + 4) : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_seen = row + 8 * r < keys;
#pragma unroll
      for (int j = 0; j < C::kBlockM / 8; ++j) {
        s[4 * j + 2 * r] = is_seen ? s[4 * j + 2 * r] : -INFINITY;
        s[4 * j + 2 * r + 1] = is_seen ? s[4 * j + 2 * r + 1] : -INFINITY;
      }
    }
  }
};

// `kHasHalves`: blocks of keys may fill one half of a tile and not the other, whose warpgroup then
// has little to do.
template <typename C, bool kHasHalves>
struct ListedStepWorker : StepWorker<C, GranuleMask<C, kHasHalves>> {
  using Base = StepWorker<C, GranuleMask<C, kHasHalves>>;
  using Base::Base;
  using typename Base::Dq;
  using typename Base::DqRest;
  using Grad = float[C::kD / 2];
  static_assert(C::kD == C::kDv, "dk and dv alike");

  // As `StepWorker::step`.
  __device__ __forceinline__ bool listed_step(Grad& dk, Grad& dv, DqRest& rest, uint32_t& rest_of) {
    if constexpr (kHasHalves) {
      mbar_wait(this->smem.q_full(this->ring.stage), this->ring.phase);
      const int what = this->words();
      if ((what >> kGranuleBit & kAllGranules) == 0) return other_half(rest, rest_of, what);
    }
    return this->step(dk, dv, rest, rest_of);
  }

  // dq += dS K of the other warpgroup's keys, of this one's columns.
  __device__ __forceinline__ void multiply_other_dq(Dq& dq, uint32_t ds) const {
    using Mma = Wgmma<typename C::T, C::kDqColumns, 1>;
    const int group = thread_again() / 128 - 1, column = group * C::kDqColumns;
    const uint32_t grads = uniform(operand_low(ds + (group ^ 1) * (C::kBlockM * 128), 16));
    const uint32_t keys = uniform(operand_low(this->smem.k() + column / 64 * C::kBlockN * 128 +
                                                  (group ^ 1) * (64 * 128) + column % 64 * 2,
                                              16));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma::ss(dq, operand(grads, step * 32 / 16), operand(keys, step * 2048 / 16), step > 0);
  }

  // A step that is the other warpgroup's alone: this one's dS is zero.
  __device__ __forceinline__ bool other_half(DqRest& rest, uint32_t& rest_of, int what) {
    const BwdSmem<C>& smem = this->smem;
    const uint32_t stage = this->ring.stage, ds = smem.ds(this->flags & Base::kDsSlot);
    this->columns().add_rest(rest, rest_of);
    rest_of = this->dq_block();
    const int thread = thread_again() - 128;
    const uint32_t mine = ds + thread / 128 * (C::kBlockM * 128) + thread % 128 * 16;
#pragma unroll
    for (int i = 0; i < C::kBlockM * 128 / 2048; ++i) zero_chunk(mine + i * 2048);
    fence_async_proxy();
    mbar_wait(smem.do_full(stage), this->ring.phase);
    __syncwarp();
    named_barrier(kDsBarrier, 128 * C::kGroups);
    Dq dq;
    wgmma_fence();
    multiply_other_dq(dq, ds);
    wgmma_commit();
    if (elect_one()) mbar_arrive(smem.q_empty(stage));
    if (elect_one()) mbar_arrive(smem.do_empty(stage));
    wgmma_wait<0>();
    keep_in_place(dq);
    this->columns().add_now(dq, rest, rest_of);
    this->ring.advance();
    this->flags ^= Base::kDsSlot;
    return !(what & kWorkTileEnds);
  }
};

}  // namespace magi
