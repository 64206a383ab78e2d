// SPDX-License-Identifier: Apache-2.0
// FFA forward for sm_90a. A CTA takes a query tile at a time and iterates over all key intervals of
// its segments, accumulating in registers; the output is written once (tiles that are split along
// the keys are combined first, see fwd/combine.cuh). Warpgroup 0 is the producer (a lane that
// copies, one that schedules, and a warp that clears V rows which no query sees); the others are
// consumers.
#pragma once

#include "ffa/sm90/fwd/products.cuh"
#include "ffa/sm90/fwd/epilogue.cuh"
#include "ffa/sm90/fwd/producer.cuh"
#include "ffa/common/dropout.cuh"
#include "ffa/common/softmax.cuh"
#include "ffa/sm90/fwd/combine.cuh"
#include "ffa/sm90/fwd/block_iter.cuh"

namespace magi {

// One consumer warpgroup at work on one work tile. While the scores of block n are multiplied and
// exponentiated, the output of block n-1 is being accumulated. With one set of registers for P,
// packing waits for the multiplication that reads them: the other warpgroups keep the tensor cores
// busy meanwhile, and the stage of V is released before the next block, not in it. With two sets, P
// is packed into them in turn. `Traversal` is the warpgroup's way through the key blocks.
template <typename C, typename Traversal>
struct Worker {
  using Packed = uint32_t[C::kBlockN / 4];

  const FwdKernelParams& p;
  const FwdSmem<C>& smem;
  Traversal& traversal;
  KvRing kv;             // of the next block; the one before is packed
  Ring<C::kVStages> vs;  // the same of V, where it has three stages
  // Flags in one register.
  static constexpr uint32_t kKReady = 1,
                            kVReady = 2;  // what the next block needs has been seen to have arrived
  static constexpr uint32_t kRescale = 4;   // the output has to be rescaled before more is added
  static constexpr uint32_t kUnderWay = 8;  // with two sets: an output multiplication is
  uint32_t flags = 0;

  __device__ __forceinline__ Worker(const FwdKernelParams& params, const FwdSmem<C>& s,
                                    Traversal& w)
      : p(params), smem(s), traversal(w) {}

  // The stage of a V, so many blocks ago; the block before is the one that was packed last.
  __device__ __forceinline__ uint32_t v_stage(int ago) const {
    if constexpr (C::kVStages == 2) return KvRing{kv.blocks - ago}.stage();
    return vs.stage >= ago ? vs.stage - ago : vs.stage + C::kVStages - ago;
  }
  __device__ __forceinline__ uint32_t packed_phase() const {
    if constexpr (C::kVStages == 2) return KvRing{kv.blocks - 1}.phase();
    return vs.phase ^ (vs.stage == 0);
  }
  __device__ __forceinline__ uint32_t v_phase() const {
    return C::kVStages == 2 ? kv.phase() : vs.phase;
  }

  // Scores of the block on which the walk stands.
  __device__ __forceinline__ void start_qk(float (&s)[C::kBlockN / 2], uint32_t q) {
    if (!(flags & kKReady)) mbar_wait(smem.k_full(kv.stage()), kv.phase());
    __syncwarp();
    wgmma_fence();
    multiply_qk<C>(s, uniform(q), uniform(operand_low(smem.k(kv.stage()), 16)));
    wgmma_commit();
  }

  // The output of the block that was packed last.
  __device__ __forceinline__ void start_pv(float (&o)[C::kDv / 2], const Packed& packed) {
    if (!(flags & kVReady)) mbar_wait(smem.v_full(v_stage(1)), packed_phase());
    __syncwarp();
    wgmma_fence();
    multiply_pv<C>(o, packed, uniform(operand_low(smem.v(v_stage(1)), C::kBlockN * 128)));
    wgmma_commit();
  }

  __device__ __forceinline__ void release_k() const {
    if (elect_one()) mbar_arrive(smem.k_empty(kv.stage()));
  }

  __device__ __forceinline__ void release_v(int ago) const {
    if (elect_one()) mbar_arrive(smem.v_empty(v_stage(ago)));
  }

  // After the walk's step.
  __device__ __forceinline__ void count_block() {
    kv.advance();
    if constexpr (C::kVStages > 2) vs.advance();
    if (traversal.left == 0) traversal.next_segment();
  }

  // The walk has left the block already.
  __device__ __forceinline__ void drop(float (&s)[C::kBlockN / 2]) const {
    const int4 work_tile = lds_int4(smem.work_tile(traversal.work_stage()));
    const int thread = thread_again() - 128, lane = thread % 32;
    uint32_t q_hashes[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const OutRow at = out_row(p, work_tile.x, work_tile.y, thread / 32 * 16 + lane / 4 + 8 * r);
      q_hashes[r] = dropout_q_hash(p.dropout, at.token, p.total_q, at.head);
    }
    const auto staying =
        staying_keys<C::kBlockN>(p.dropout, q_hashes, traversal.k0 + C::kBlockN, p.total_k, lane);
#pragma unroll
    for (int i = 0; i < C::kBlockN / 2; ++i) s[i] = staying.has(i) ? s[i] * p.dropout.scale : 0.f;
  }

  // Scores to P, and on to the next block. `before_packing` is called when P is in s.
  template <typename F>
  __device__ __forceinline__ void softmax(float (&s)[C::kBlockN / 2], SoftmaxState<C>& state,
                                          Packed& packed, F before_packing) {
    if (traversal.masked()) {
      if (!C::kPlain && p.has_softcap) cap_scores<C>(s, p.scale);
      traversal.mask(s);
    }
    flags = state.refer(s, p.scale_log2, p.unscale, p.slack) ? kRescale : 0;
    traversal.step();
    const KvRing after{kv.blocks + 1};
    flags |= mbar_test(smem.v_full(v_stage(0)), v_phase()) ? kVReady : 0;
    flags |= mbar_test(smem.k_full(after.stage()), after.phase()) ? kKReady : 0;
    state.exponentiate(s, p.scale_log2);
    if constexpr (C::kDropout) drop(s);
    before_packing();
    pack_scores<C>(packed, s);
    count_block();
  }

  // Ends the output multiplication, while the last `kPending` multiplications may go on.
  template <int kPending>
  __device__ __forceinline__ void finish_pv(float (&o)[C::kDv / 2], const SoftmaxState<C>& state) {
    wgmma_wait<kPending>();
    keep_in_place(o);
    if (flags & kUnderWay) release_v(2);
    if (flags & kRescale) state.rescale(o);
  }

  // The first block, or the first after a drain.
  __device__ __forceinline__ void first_block(float (&s)[C::kBlockN / 2], Packed& packed,
                                              SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    wgmma_wait<0>();
    keep_in_place(s);
    release_k();
    softmax(s, state, packed, [] {});
  }

  // With two sets of registers for P.
  __device__ __forceinline__ void next_block(float (&s)[C::kBlockN / 2], float (&o)[C::kDv / 2],
                                             const Packed& before, Packed& after,
                                             SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    finish_pv<1>(o, state);
    start_pv(o, before);
    wgmma_wait<1>();  // leaves this output multiplication under way
    keep_in_place(s);
    release_k();
    softmax(s, state, after, [] {});
    flags |= kUnderWay;
  }

  // With one set.
  __device__ __forceinline__ void next_block(float (&s)[C::kBlockN / 2], float (&o)[C::kDv / 2],
                                             Packed& packed, SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    if (flags & kRescale) state.rescale(o);
    start_pv(o, packed);
    wgmma_wait<1>();
    keep_in_place(s);
    release_k();
    softmax(s, state, packed, [&] {
      wgmma_wait<0>();
      keep_in_place(o);
      release_v(1);
    });
  }

  // Finishes all multiplications and releases their stages.
  __device__ __forceinline__ void drain(float (&o)[C::kDv / 2], const Packed& packed,
                                        const SoftmaxState<C>& state) {
    finish_pv<0>(o, state);
    start_pv(o, packed);
    wgmma_wait<0>();
    keep_in_place(o);
    release_v(1);
  }

  // A block without work for this warpgroup; nothing may be under way, or the rings could not move
  // on.
  __device__ __forceinline__ void skip_block() {
    mbar_wait(smem.k_full(kv.stage()), kv.phase());
    mbar_wait(smem.v_full(v_stage(0)), v_phase());
    release_k();
    release_v(0);
    traversal.step();
    count_block();
    flags = 0;
  }
};

template <typename C, typename Traversal>
__device__ void compute(const FwdKernelParams& p, const FwdSmem<C>& smem) {
  float o[C::kDv / 2], s[C::kBlockN / 2];
  typename Worker<C, Traversal>::Packed even, odd;  // odd where there are two sets
  Traversal traversal(p, smem);
  Worker<C, Traversal> worker(p, smem, traversal);
  // The output of a work tile is staged over the warpgroup's rows of its Q. Those are free once the
  // store has read them, which is asked for in the next work tile, when it costs nothing. With one
  // Q stage it cannot wait that long.
  bool stored = false;
  auto release_stored = [&] {
    if (stored && thread_again() % 128 == 0) {
      store_wait_read();
      mbar_arrive(smem.q_empty(C::kQStages == 1 ? 0 : traversal.work_stage() ^ 1));
    }
    stored = false;
  };

  while (true) {
    mbar_wait(smem.work_full(traversal.work_stage()), traversal.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(traversal.work_stage()));
    if (uniform(work_tile.x) < 0) break;
    SoftmaxState<C> state;
    state.reset();
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) o[i] = 0.f;
    const uint32_t q_stage = C::kQStages == 1 ? 0 : traversal.work_stage();
    const uint32_t q =
        operand_low(smem.q(q_stage) + uniform(thread_again() / 128 - 1) * 64 * 128, 16);
    worker.flags = 0;
    traversal.start(uniform(work_tile.z));
    if (C::kQStages == 1) release_stored();
    mbar_wait(smem.q_full(q_stage),
              C::kQStages == 1 ? traversal.work_stage() : traversal.work_phase());
    while (traversal.left > 0) {
      if (!traversal.has_work()) {
        worker.skip_block();
        continue;
      }
      worker.first_block(s, even, state, q);
      if (C::kQStages > 1) release_stored();
      if constexpr (C::kPackedSets == 1) {
        while (traversal.has_work()) worker.next_block(s, o, even, state, q);
        worker.drain(o, even, state);
      } else {
        while (true) {
          if (!traversal.has_work()) {
            worker.drain(o, even, state);
            break;
          }
          worker.next_block(s, o, even, odd, state, q);
          if (!traversal.has_work()) {
            worker.drain(o, odd, state);
            break;
          }
          worker.next_block(s, o, odd, even, state, q);
        }
      }
    }
    if (C::kQStages > 1) release_stored();
    const int group = uniform(thread_again() / 128 - 1);
    bool whole = true;
    if constexpr (!C::kPlain) {
      const int4 cut = lds_int4(smem.work_tile(traversal.work_stage()));
      const Part part = Part::of_placed_word(uniform(cut.w));
      const int number = Part::place_of_word(uniform(cut.w)) * p.head_units + uniform(cut.y);
      if (part.count > 1) whole = combine_splits<C>(p, o, state, number, part, group);
    }
    // Tile and head are read again rather than kept in registers.
    const int4 again = lds_int4(smem.work_tile(traversal.work_stage()));
    __syncwarp();
    if (elect_one()) mbar_arrive(smem.work_empty(traversal.work_stage()));
    const uint32_t out = smem.out(group, C::kQStages == 1 ? 0 : traversal.work_stage());
    if (whole) write_tile<C>(p, out, o, state, uniform(again.x), uniform(again.y), group);
    traversal.next_work();
    stored = true;
  }
  if (thread_again() % 128 == 0) store_wait_all();
}

// A CTA, with blocks of C::kBlockN keys.
template <typename C>
__device__ __forceinline__ void run_fwd(const FwdKernelParams& p, uint32_t smem_start) {
  const FwdSmem<C> smem(smem_start, p.tile_tokens);
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_maps[C::kKvMaps]);
    prefetch_tensor_map(&p.v_maps[C::kKvMaps]);
    prefetch_tensor_map(&p.out_map);
  }
  __syncthreads();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles<C>(p, smem);
    if (threadIdx.x == 32) schedule_fwd<C>(p, smem);
    if (threadIdx.x / 32 == 2) zero_masked_rows<C>(p, smem, threadIdx.x % 32);
  } else {
    registers_grow<C::kConsumerRegisters>();
    compute<C, NBlockIter<C>>(p, smem);
  }
}

template <typename C>
__device__ __forceinline__ bool small_blocks_pay(const magi_tile_plan_header& plan) {
  constexpr int kSizeIndex = (C::kBlockN - 64) / 16;
  static_assert(kSizeIndex < MAGI_KEY_BLOCK_SIZES && kSmallBlockN == 64, "plans count these");
  return plan.num_key_blocks[0] * (kSmallBlockN + kBlockCost) <
         plan.num_key_blocks[kSizeIndex] * (C::kBlockN + kBlockCost);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    ffa_fwd(const __grid_constant__ FwdKernelParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  const bool fits = plan.total_q == p.total_q && plan.tile_tokens == p.tile_tokens &&
                    plan.num_groups == C::kGroups;
  if (plan.status != 0 || !fits) {
    write_nan<C>(p);
    if (threadIdx.x == 0) end_peer_kv(p.remote, p.workspace + 2);
    return;
  }
  if constexpr (C::kHasSmallBlocks) {
    if (p.allows_small_blocks && small_blocks_pay<C>(plan)) {
      run_fwd<SmallBlocks<C>>(p, smem_addr(raw));
      return;
    }
  }
  run_fwd<C>(p, smem_addr(raw));
}

}  // namespace magi
