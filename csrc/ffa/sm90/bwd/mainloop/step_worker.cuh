// SPDX-License-Identifier: Apache-2.0
// One consumer warpgroup of the backward kernel: its state, and what all kinds of step are made of.
// Each kind of step has a file of its own, see bwd/mainloop.cuh.
#pragma once

#include "ffa/common/dropout.cuh"
#include "device/atomics.cuh"
#include "device/registers.cuh"
#include "ffa/common/scores.cuh"
#include "device/tma.cuh"
#include "ffa/sm90/wgmma.cuh"
#include "ffa/sm90/bwd/mainloop/dq_columns.cuh"
#include "ffa/sm90/bwd/mainloop/interval_mask.cuh"
#include "ffa/sm90/bwd/mainloop/softmax_grads.cuh"
#include "ffa/sm90/bwd/smem.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

// Named barriers.
constexpr int kDsBarrier = 1;     // of both warpgroups
constexpr int kGroupBarrier = 2;  // + warpgroup

template <typename C, typename Mask = IntervalMask<C>>
struct StepWorker {
  using Scores = ScoresOf<C>;
  using Packed = PackedOf<C>;
  template <int kColumns>
  using Grad = float[kColumns / 2];
  using Columns = DqColumns<C>;
  using Dq = typename Columns::Dq;
  using DqRest = typename Columns::Rest;
  // dK is there before dq is begun, where registers hold one product at a time beside dk and dv.
  static constexpr bool kDkFirst = C::kD == 256;
  // The multiplication for dK goes on into the next step. Takes registers, and a second stage of Q.
  static constexpr bool kOverlapDk =
      Mask::kLetsDkOverlap && !C::kIsGeneral && !C::kIsWide && !kDkFirst && C::kStages > 1;
  static constexpr bool kOverlapDv = C::kStages > 1;  // in the pass of dv
  // dP is asked for when the scores are there, not before: 1 to 2% faster, but not in narrow steps
  // in deterministic order (docs/log/ffa_backward.md). Not measured for other head dims.
  static constexpr bool kScoresFirst =
      C::kIsTight || C::kIsWide || (C::kIsMedium && !C::kSemaphored);
  // dS is made of P as it was rounded.
  static constexpr bool kRoundsP = C::kIsWide || C::kIsTight || (kDkFirst && C::kIsGeneral);
  // Masks are laid on before that. The branch around them ends a block of machine code, and behind
  // dP it would keep ptxas from spreading its products among the exponentials.
  static constexpr bool kMaskFirst = kScoresFirst && !C::kIsGeneral;
  // Pairs, loaded while dP is still being made, in narrow steps; not in deterministic order, where
  // with this and operands by 64 bits most masks took longer (docs/log/ffa_backward_turns.md).
  static constexpr int kEarlyDeltas = C::kSemaphored ? 0 : 2;
  // All of them, in wide steps, where there are registers.
  static constexpr bool kLoadsDeltasEarly = C::kBlockM <= kBlockM80;
  // Products for dK ahead of the barrier, so that there is work behind it.
  static constexpr int kEarlyDk = kDkFirst ? C::kBlockM / 16 : C::kIsGeneral ? 0 : 1;

  const BwdKernelParams& p;
  const BwdSmem<C>& smem;
  Ring<C::kStages> ring;
  static constexpr uint32_t kDsSlot = 1;  // of this step
  // In the step before: the multiplication for dK is under way; or, in wide steps, its share of dq
  // has not been announced.
  static constexpr uint32_t kUnfinished = 2;
  uint32_t flags = 0;  // and from bit 2 on the number of work tiles so far

  __device__ __forceinline__ PipelineState state() const { return PipelineState{flags >> 2 & 3}; }
  __device__ __forceinline__ void next_work() { flags += 4; }
  // Whether this is the pass of dk and dq, not the one of dv.
  __device__ __forceinline__ bool makes_dq() const {
    return C::kPasses == 1 ||
           magi::makes_dq<C>(uniform(lds_int(smem.work_tile(state().work_stage()) + 12)));
  }

  __device__ __forceinline__ StepWorker(const BwdKernelParams& params, const BwdSmem<C>& s)
      : p(params), smem(s) {}

  // This warpgroup's 64 rows of K or V as the first operand.
  __device__ __forceinline__ uint32_t rows_of(uint32_t keys) const {
    return uniform(operand_low(keys + (thread_again() / 128 - 1) * 64 * 128, 16));
  }

  // S^T = K Q^T, or dP^T = V dO^T: this warpgroup's 64 rows by all queries of the step.
  template <int kColumns>
  __device__ __forceinline__ void multiply_rows(Scores& s, uint32_t a, uint32_t queries) const {
    using Mma = Wgmma<typename C::T, C::kBlockM, 0>;
    const uint32_t b = uniform(operand_low(queries, 16));
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const int in_atom = (step % 4) * 32, atom = step / 4;
      Mma::ss(s, along<C>(a, (atom * C::kBlockN * 128 + in_atom) / 16),
              along<C>(b, (atom * C::kBlockM * 128 + in_atom) / 16), step > 0);
    }
  }

  // The scores of a step, when its Q is there; and its dP, when dO is.
  __device__ __forceinline__ void start_scores(Scores& s) const {
    mbar_wait(smem.q_full(ring.stage), ring.phase);
    __syncwarp();
    wgmma_fence();
    multiply_rows<C::kD>(s, rows_of(smem.k()), smem.q(ring.stage));
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(Scores& dp) const {
    mbar_wait(smem.do_full(ring.stage), ring.phase);
    __syncwarp();
    wgmma_fence();
    multiply_rows<C::kDv>(dp, rows_of(smem.v()), smem.dout(ring.stage));
    wgmma_commit();
  }

  // dV += P^T dO, or dK += dS^T Q, over groups of 16 queries.
  template <int kFrom = 0, int kTo = C::kBlockM / 16, int kValues>
  __device__ __forceinline__ void multiply_grad(float (&grad)[kValues], const Packed& packed,
                                                uint32_t queries) const {
    using Mma = Wgmma<typename C::T, 2 * kValues, 1>;
    const uint32_t b = uniform(operand_low(queries, C::kBlockM * 128));
#pragma unroll
    for (int step = kFrom; step < kTo; ++step)
      Mma::rs(grad, packed + 4 * step, along<C>(b, step * 2048 / 16), 1);
  }

  __device__ __forceinline__ Columns columns() const { return {p, smem}; }
  // The block of dq_accum where this warpgroup's share of the step begins.
  __device__ __forceinline__ uint32_t dq_block() const {
    return Columns::block(lds_int(smem.step(ring.stage)));
  }

  // What this warpgroup needs to know of the step.
  __device__ __forceinline__ int words() const {
    return uniform(lds_int(smem.step(ring.stage) + 4 + thread_again() / 128 * 4));
  }

  // -inf where a key does not see a query.
  __device__ __forceinline__ void mask(Scores& s, int what) const {
    Mask::apply(smem, ring.stage, what, s);
  }

  // Scores to P, or its factor: see `scores_to_p`.
  template <bool kPacksFactor = false>
  __device__ __forceinline__ void exponentiate(Scores& s, Packed& packed, int what) const {
    const auto mask_now = [&] {
      if (!kMaskFirst && what & kMasked) mask(s, what);
    };
    scores_to_p<C, kRoundsP, kPacksFactor>(p, smem.stats(ring.stage), s, packed, mask_now);
  }

  // Which values of the step stay under dropout.
  __device__ __forceinline__ Staying<C::kBlockM> staying() const {
    const int tile = lds_int(smem.work_tile(state().work_stage()));
    const int number = lds_int(smem.step(ring.stage)), q0 = lds_int(smem.step(ring.stage) + 4);
    const int thread = thread_again() - 128, lane = thread % 32;
    const int key = tile * C::kBlockN + thread / 32 * 16 + lane / 4;
    const uint32_t k_hashes[2] = {dropout_k_hash(p.dropout, key, p.total_k),
                                  dropout_k_hash(p.dropout, key + 8, p.total_k)};
    return staying_queries<C::kBlockM>(p.dropout, k_hashes, q0, p.total_q, number / p.num_m_blocks,
                                       lane);
  }

  __device__ __forceinline__ uint32_t deltas_at() const {
    return smem.stats(ring.stage) + C::kDeltasAt + thread_again() % 4 * 8;
  }

  __device__ __forceinline__ uint32_t fragment() const {
    return C::kDqFragments == 2 ? uniform(thread_again() / 128 - 1) : 0;
  }

  // That it is there, seen by bulk copies, too.
  __device__ __forceinline__ void announce_dq() const {
    // Where two lanes add, of the one that has this step's; wide steps are in the next one by now.
    const uint32_t full =
        smem.dq_full(C::kDqStoreLanes == 2 ? (flags & kDsSlot) ^ C::kIsWide : fragment());
    fence_async_proxy();
    __syncwarp();
    if (elect_one()) mbar_arrive(full);
  }

  // Both at once, in narrow steps in deterministic order.
  __device__ __forceinline__ void hand_over_dq(const Dq& dq, int what) const {
    if constexpr (C::kDqOverDs) {
      named_barrier(kDsBarrier, 128 * C::kGroups);  // both are through with dS
      // There is room for one share, or for rounded ones of both.
      if (fragment() == 1 && !(C::kDirectStore && what & kDirectStoreBit))
        mbar_wait(smem.dq_empty(0), flags & kDsSlot);
    } else {
      mbar_wait(smem.dq_empty(0), flags & kDsSlot ^ 1);
    }
    columns().leave(dq, what);
    announce_dq();
  }

  __device__ __forceinline__ void release_segment(int what) const {
    if (what & kSegmentEnds && elect_one())
      mbar_arrive(smem.segment_empty(what >> kSegmentStageBit & 1));
  }

  __device__ __forceinline__ uint32_t stage_before() const {
    return ring.stage > 0 ? ring.stage - 1 : C::kStages - 1;
  }
  __device__ __forceinline__ static void release_before(uint32_t bar) {
    if (elect_one()) mbar_arrive(bar);
  }
  __device__ __forceinline__ void release_q_before() const {
    release_before(smem.q_empty(stage_before()));
  }

  __device__ __forceinline__ void scores_are_there(Scores& s) const {
    wgmma_wait<kScoresFirst ? 0 : 1>();
    keep_in_place(s);
    if (kOverlapDk && flags & kUnfinished) release_q_before();
  }

  // The kinds of step; false after the last step of the work tile.
  template <typename Dk, typename Dv>
  __device__ __forceinline__ bool step(Dk& dk, Dv& dv, DqRest& rest, uint32_t& rest_of);
  __device__ __forceinline__ bool step_tight(Grad<C::kD>& dk, Grad<C::kDv>& dv);
  __device__ __forceinline__ bool step_wide(Grad<C::kD>& dk, Grad<C::kDv>& dv, uint32_t& keys);
  template <int kValues>
  __device__ __forceinline__ bool step_dv(float (&grad)[kValues], Packed& packed_p);

  // Ends what the last step of a work tile has left under way.
  template <typename Dk, typename Dv>
  __device__ __forceinline__ void finish(Dk& dk, Dv& dv) {
    wgmma_wait<0>();
    keep_in_place(dk);
    if constexpr (C::kPasses == 1) keep_in_place(dv);
    if (C::kIsWide && flags & kUnfinished) announce_dq();
    if (kOverlapDk && flags & kUnfinished) release_q_before();
    flags &= ~kUnfinished;
  }
  // The same of the pass that makes dv alone.
  template <int kValues>
  __device__ __forceinline__ void finish_dv(float (&dv)[kValues]);
};

}  // namespace magi
