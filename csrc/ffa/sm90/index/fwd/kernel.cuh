// SPDX-License-Identifier: Apache-2.0
// Forward of index attention for sm_90a. A work tile is one list of keys and query rows that share
// it; a CTA iterates over the keys in blocks that its first warpgroup gathers, and writes the
// output once.
#pragma once

#include "device/shared.cuh"
#include "ffa/sm90/fwd/products.cuh"
#include "ffa/sm90/index/fwd/epilogue.cuh"
#include "ffa/sm90/index/fwd/producer.cuh"
#include "ffa/sm90/index/unused_rows.cuh"
#include "ffa/sm90/index/warp_roles.cuh"

namespace magi {

// One consumer warpgroup. While the scores of block n are multiplied and exponentiated, the output
// of block n-1 is being accumulated; P is packed into two sets of registers in turn.
template <typename C>
struct IndexWorker {
  using Packed = uint32_t[C::kBlockN / 4];

  const IndexFwdParams& p;
  const IndexFwdSmem<C>& smem;
  Ring<C::kKStages> ks;
  Ring<C::kVStages> vs;      // of the block whose scores come next; the one before is packed
  int left = 0;              // keys from the block on whose scores come next
  bool is_rescaled = false;  // the output has to be rescaled before it grows
  bool is_growing = false;   // an output multiplication is under way

  __device__ IndexWorker(const IndexFwdParams& params, const IndexFwdSmem<C>& s)
      : p(params), smem(s) {}

  __device__ __forceinline__ uint32_t v_stage(uint32_t ago) const {
    return vs.stage >= ago ? vs.stage - ago : vs.stage + C::kVStages - ago;
  }

  __device__ __forceinline__ void start_qk(float (&s)[C::kBlockN / 2], uint32_t q) {
    mbar_wait(smem.k_full(ks.stage), ks.phase);
    fence_async_proxy();
    __syncwarp();
    wgmma_fence();
    multiply_qk<C>(s, uniform(q), uniform(operand_low(smem.k(ks.stage), 16)));
    wgmma_commit();
  }

  // The output of the block that was packed last.
  __device__ __forceinline__ void start_pv(float (&o)[C::kDv / 2], const Packed& packed) {
    mbar_wait(smem.v_full(v_stage(1)), vs.phase ^ (vs.stage == 0));
    fence_async_proxy();
    __syncwarp();
    wgmma_fence();
    multiply_pv<C>(o, packed, uniform(operand_low(smem.v(v_stage(1)), C::kBlockN * 128)));
    wgmma_commit();
  }

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (elect_one()) mbar_arrive(bar);
  }

  // Scores to P; the stage of K is free.
  __device__ __forceinline__ void softmax(float (&s)[C::kBlockN / 2], SoftmaxState<C>& state,
                                          Packed& packed) {
    release(smem.k_empty(ks.stage));
    if (left < C::kBlockN) {
      const int2 keys[2] = {make_int2(0, left), make_int2(0, left)};
      mask_scores<C::kBlockN>(s, 0, keys, threadIdx.x % 32);
    }
    is_rescaled = state.refer(s, p.scale_log2, p.unscale, p.slack);
    state.exponentiate(s, p.scale_log2);
    pack_scores<C>(packed, s);
    left -= C::kBlockN;
    ks.advance();
    vs.advance();
  }

  // Ends the output multiplication that is under way, if any; the last kPending may go on.
  template <int kPending>
  __device__ __forceinline__ void finish_pv(float (&o)[C::kDv / 2], const SoftmaxState<C>& state) {
    wgmma_wait<kPending>();
    keep_in_place(o);
    if (is_growing) release(smem.v_empty(v_stage(2)));
    if (is_rescaled) state.rescale(o);
  }

  __device__ __forceinline__ void first_block(float (&s)[C::kBlockN / 2], Packed& packed,
                                              SoftmaxState<C>& state, uint32_t q) {
    is_growing = false;
    start_qk(s, q);
    wgmma_wait<0>();
    keep_in_place(s);
    softmax(s, state, packed);
  }

  __device__ __forceinline__ void next_block(float (&s)[C::kBlockN / 2], float (&o)[C::kDv / 2],
                                             const Packed& before, Packed& after,
                                             SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    finish_pv<1>(o, state);
    start_pv(o, before);
    wgmma_wait<1>();  // leaves this output multiplication under way
    keep_in_place(s);
    softmax(s, state, after);
    is_growing = true;
  }

  __device__ __forceinline__ void last_output(float (&o)[C::kDv / 2], const Packed& packed,
                                              const SoftmaxState<C>& state) {
    finish_pv<0>(o, state);
    start_pv(o, packed);
    wgmma_wait<0>();
    keep_in_place(o);
    release(smem.v_empty(v_stage(1)));
  }
};

template <typename C>
__device__ void compute_lists(const IndexFwdParams& p, const IndexFwdSmem<C>& smem) {
  float o[C::kDv / 2], s[C::kBlockN / 2];
  typename IndexWorker<C>::Packed even, odd;
  IndexWorker<C> worker(p, smem);
  Ring<C::kQStages> qs;
  const int group = uniform(threadIdx.x / 128 - 1);
  bool stored = false;  // the output before lies in the other stage of Q, and may be on its way
  for (TileWalk walk(p.work.num_tiles()); !walk.is_over(); walk.advance()) {
    const WorkTile tile = work_tile(p.work, walk.number);
    SoftmaxState<C> state;
    state.reset();
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) o[i] = 0.f;
    worker.left = __ldg(p.keys.key_counts + tile.list);
    const bool any = worker.left > 0;
    const uint32_t q = operand_low(smem.q(qs.stage) + group * 64 * 128, 16);
    mbar_wait(smem.q_full(qs.stage), qs.phase);
    if (any) worker.first_block(s, even, state, q);
    if (stored && threadIdx.x % 128 == 0) {
      store_wait_read();
      mbar_arrive(smem.q_empty(qs.stage ^ 1));
    }
    while (any) {
      if (worker.left <= 0) {
        worker.last_output(o, even, state);
        break;
      }
      worker.next_block(s, o, even, odd, state, q);
      if (worker.left <= 0) {
        worker.last_output(o, odd, state);
        break;
      }
      worker.next_block(s, o, odd, even, state, q);
    }
    write_rows<C>(p, smem.q(qs.stage) + group * 64 * 128, o, state, tile, group);
    stored = true;
    qs.advance();
  }
  if (threadIdx.x % 128 == 0) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    index_fwd(const __grid_constant__ IndexFwdParams p) {
  const auto smem = make_smem<IndexFwdSmem<C>>(p.q_map, p.out_map);
  // Rows of a warp are rescaled together, so what unused rows hold must not differ from run to run.
  for (int stage = 0; stage < C::kQStages; ++stage)
    clear_unused_rows<C::kBlockM, C::kD, C::kThreads>(smem.q(stage), p.work.rows, threadIdx.x);
  __syncthreads();
  split_roles<C>([&] { feed<C>(p, smem); }, [&] { compute_lists<C>(p, smem); });
}

}  // namespace magi
