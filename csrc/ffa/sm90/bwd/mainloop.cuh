// SPDX-License-Identifier: Apache-2.0
// One consumer warpgroup of the backward kernel, at work on a step: one block of queries of one
// head. What the step is, the copying lane has left in shared memory.
//
// The scores are transposed: rows are the warpgroup's 64 keys, columns the queries of the step. So
// P and dS come out of the registers as the A operands of dV and dK; only dq, which needs all keys,
// takes dS from shared memory.
//
// Wide blocks have more arithmetic for each wait, and K and V are read from shared memory less
// often for each query. In blocks of 80 dq is transposed too, because rows come in units of 64;
// blocks of 128 have 64 rows for each warpgroup. Registers have no room for scores in float32
// beside P: dS is made from P as it was rounded.
#pragma once

#include "ffa/common/dropout.cuh"
#include "ffa/common/ptx/atomics.cuh"
#include "ffa/common/ptx/registers.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/tma.cuh"
#include "ffa/sm90/wgmma.cuh"
#include "ffa/sm90/bwd/dq_columns.cuh"
#include "ffa/sm90/bwd/interval_mask.cuh"
#include "ffa/sm90/bwd/softmax_grads.cuh"
#include "ffa/sm90/bwd/smem.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

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

  // The multiplication for dK is left under way with kOverlapDk; it ends in the next step, or in
  // `finish`. With two passes dv is left to the other. False after the last step of the work tile.
  template <typename Dk, typename Dv>
  __device__ __forceinline__ bool step(Dk& dk, Dv& dv, DqRest& rest, uint32_t& rest_of) {
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

  // A step where dk and dv leave registers for one more product at a time: scores become P before
  // dP is asked for, and dK is there before dq is. False after the last step of the work tile.
  __device__ __forceinline__ bool step_tight(Grad<C::kD>& dk, Grad<C::kDv>& dv) {
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

  // A step of the pass that makes dv alone, in the first columns of `grad`. Its product is left
  // under way, behind the next scores.
  template <int kValues>
  __device__ __forceinline__ bool step_dv(float (&grad)[kValues], Packed& packed_p) {
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

  // A wide step. Q of the step is there, and `keys` are this warpgroup's rows of K. Whatever it
  // needs to look up or to wait for is asked for while products are made: between them the tensor
  // cores would be idle. For the same reason a share of dq is announced in the next step, or in
  // `finish`: the fence ahead of that waits for the stores, some 270 clocks while dK is made.
  __device__ __forceinline__ bool step_wide(Grad<C::kD>& dk, Grad<C::kDv>& dv, uint32_t& keys) {
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
  __device__ __forceinline__ void finish_dv(float (&dv)[kValues]) {
    wgmma_wait<0>();
    keep_in_place(dv);
    if (kOverlapDv && flags & kUnfinished) release_before(smem.do_empty(stage_before()));
    flags &= ~kUnfinished;
  }
};

}  // namespace magi
