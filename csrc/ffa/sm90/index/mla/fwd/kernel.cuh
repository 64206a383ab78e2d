// SPDX-License-Identifier: Apache-2.0
// Forward of index attention in MLA's form for sm_90a: the values are the first columns of the
// keys. A work tile is one list and 64 query rows that share it. Two consumer warpgroups alternate
// over the blocks of 64 keys, make the scores and P of their own, and accumulate half of the output
// columns of all.
#pragma once

#include "ffa/sm90/index/mla/fwd/epilogue.cuh"
#include "ffa/sm90/index/mla/fwd/producer.cuh"
#include "ffa/sm90/index/mla/products.cuh"
#include "ffa/sm90/index/unused_rows.cuh"
#include "ffa/sm90/index/warp_roles.cuh"

namespace magi {

// One consumer warpgroup. Block b and what belongs to it are those of warpgroup b % 2.
template <typename C, int kGroup>
struct MlaWorker {
  static constexpr int kOther = 1 - kGroup;
  using Scores = float[C::kBlockN / 2];
  using Packed = uint32_t[C::kBlockN / 4];
  using Rows = float[C::kDv / 2];

  const IndexFwdParams& p;
  const MlaFwdSmem<C>& smem;
  uint32_t phases[C::kStages] = {0, 0};

  __device__ MlaWorker(const IndexFwdParams& params, const MlaFwdSmem<C>& s) : p(params), smem(s) {}

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (elect_one()) mbar_arrive(bar);
  }

  // The scores of this warpgroup's block.
  __device__ __forceinline__ void start_qk(Scores& s) const {
    const uint32_t q = uniform(operand_low(smem.q(), 16));
    const uint32_t k = uniform(operand_low(smem.k(kGroup), 16));
    multiply_part<0>(s, q, k);
    multiply_part<1>(s, q, k);
    multiply_part<C::kTail>(s, q, k);
    wgmma_commit();
  }

  template <int kPart>
  __device__ __forceinline__ void multiply_part(Scores& s, uint32_t q, uint32_t k) const {
    mbar_wait(smem.k_full(kGroup, kPart), phases[kGroup]);
    fence_async_proxy();
    __syncwarp();
    wgmma_fence();
    multiply_atoms<typename C::T, C::part_begin(kPart), C::part_end(kPart)>(s, q, k);
  }

  // The output of this warpgroup's block, from P in registers.
  __device__ __forceinline__ void start_own_pv(Rows& o, const Packed& packed) const {
    using Mma = Wgmma<typename C::T, C::kDv, 1>;
    const uint32_t v = uniform(operand_low(smem.values(kGroup, kGroup), C::kAtomBytes));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kBlockN / 16; ++step)
      Mma::rs(o, packed + 4 * step, operand(v, step * 2048 / 16), 1);
    wgmma_commit();
  }

  // That of the other's block, from P in shared memory.
  __device__ __forceinline__ void start_other_pv(Rows& o) const {
    using Mma = Wgmma<typename C::T, C::kDv, 1>;
    const uint32_t a = uniform(operand_low(smem.p(kOther), 16));
    const uint32_t v = uniform(operand_low(smem.values(kOther, kGroup), C::kAtomBytes));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kBlockN / 16; ++step)
      Mma::ss(o, operand(a, step * 32 / 16), operand(v, step * 2048 / 16), 1);
    wgmma_commit();
  }

  // Each ends its output, and the values may be overwritten; behind the other's, P too.
  __device__ __forceinline__ void finish_own_pv(Rows& o) const {
    wgmma_wait<0>();
    keep_in_place(o);
    release(smem.k_empty(kGroup, kGroup));
  }
  __device__ __forceinline__ void finish_other_pv(Rows& o) const {
    wgmma_wait<0>();
    keep_in_place(o);
    release(smem.k_empty(kOther, kGroup));
    release(smem.k_empty(kOther, C::kTail));
  }

  // Scores to P, in registers and for the other warpgroup. True if the output has to be rescaled.
  __device__ __forceinline__ bool softmax(Scores& s, SoftmaxState<C>& state, Packed& packed,
                                          int left) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    if (left < C::kBlockN) {
      const int2 keys[2] = {make_int2(0, left), make_int2(0, left)};
      mask_scores<C::kBlockN>(s, 0, keys, lane);
    }
    const bool is_rescaled = state.refer(s, p.scale_log2, p.unscale, p.slack);
    state.exponentiate(s, p.scale_log2);
    pack_scores<C>(packed, s);
    named_barrier(kOneGroup + kGroup, 128);  // no warp reads the tail of the keys any more
    const int matrix = lane / 8, row = 16 * warp + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < C::kBlockN / 8; j += 2) {
      const int chunk = j + (matrix >> 1);
      store_matrix_x4(smem.p(kGroup) + row * 128 + ((chunk ^ (row & 7)) << 4), packed[2 * j],
                      packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sts_int(smem.references(kGroup) + 4 * (16 * warp + lane / 4 + 8 * r),
                __float_as_int(state.reference[r]));
    }
    fence_async_proxy();
    __syncwarp();
    release(smem.p_full(kGroup));
    return is_rescaled;
  }

  // Waits for the other's P and takes over its references. True if the output has to be rescaled.
  __device__ __forceinline__ bool follow(SoftmaxState<C>& state) const {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    mbar_wait(smem.p_full(kOther), phases[kOther]);
    fence_async_proxy();
    __syncwarp();
    float reference[2];
    bool differ = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = __int_as_float(lds_int(smem.references(kOther) + 4 * (row + 8 * r)));
      differ |= reference[r] != state.reference[r];
    }
    if (!__any_sync(0xffffffff, differ)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) state.move_reference(r, reference[r], p.unscale, p.slack);
    return true;
  }
};

// The even blocks. `left`: keys from the first block on whose scores come next.
template <typename C>
__device__ __forceinline__ void attend_even(MlaWorker<C, 0>& worker, float (&o)[C::kDv / 2],
                                            SoftmaxState<C>& state, int left) {
  float s[C::kBlockN / 2];
  typename MlaWorker<C, 0>::Packed packed;
#pragma unroll 1
  for (; left > 0; left -= 2 * C::kBlockN) {
    worker.start_qk(s);
    wgmma_wait<0>();
    keep_in_place(s);
    if (worker.softmax(s, state, packed, left)) state.rescale(o);
    worker.start_own_pv(o, packed);
    worker.finish_own_pv(o);
    worker.phases[0] ^= 1;
    if (left <= C::kBlockN) break;
    if (worker.follow(state)) state.rescale(o);
    worker.start_other_pv(o);
    worker.finish_other_pv(o);
    worker.phases[1] ^= 1;
  }
}

// The odd blocks. The output of the block before is accumulated while P is made.
template <typename C>
__device__ __forceinline__ void attend_odd(MlaWorker<C, 1>& worker, float (&o)[C::kDv / 2],
                                           SoftmaxState<C>& state, int left) {
  float s[C::kBlockN / 2];
  typename MlaWorker<C, 1>::Packed packed;
#pragma unroll 1
  for (; left > 0; left -= 2 * C::kBlockN) {
    // Two ways with the same ends: where scores are under way or not, ptxas makes wgmma wait.
    if (left > C::kBlockN) {
      worker.start_qk(s);
      if (worker.follow(state)) state.rescale(o);
      worker.start_other_pv(o);
      wgmma_wait<1>();
      keep_in_place(s);
      const bool is_rescaled = worker.softmax(s, state, packed, left - C::kBlockN);
      worker.finish_other_pv(o);
      if (is_rescaled) state.rescale(o);
      worker.start_own_pv(o, packed);
      worker.finish_own_pv(o);
      worker.phases[1] ^= 1;
    } else {
      if (worker.follow(state)) state.rescale(o);
      worker.start_other_pv(o);
      worker.finish_other_pv(o);
    }
    worker.phases[0] ^= 1;
  }
}

template <typename C, int kGroup>
__device__ void compute_latents(const IndexFwdParams& p, const MlaFwdSmem<C>& smem) {
  float o[C::kDv / 2];
  MlaWorker<C, kGroup> worker(p, smem);
  uint32_t item_phase = 0;
#pragma unroll 1
  for (TileWalk walk(num_work_items(p.work)); !walk.is_over(); walk.advance()) {
    const WorkItem item(p.work, walk.number);
    SoftmaxState<C> state;
    state.reset();
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) o[i] = 0.f;
    const int left = __ldg(p.keys.key_counts + item.tile.list);
    mbar_wait(smem.q_full(), item_phase);
    __syncwarp();
    if constexpr (kGroup == 0)
      attend_even<C>(worker, o, state, left);
    else
      attend_odd<C>(worker, o, state, left);
    write_latent_rows<C>(p, smem, o, state, item, kGroup, item_phase);
    item_phase ^= 1;
  }
  if (threadIdx.x % 128 == 0) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    index_mla_fwd(const __grid_constant__ IndexFwdParams p) {
  const auto smem = make_smem<MlaFwdSmem<C>>(p.q_map, p.out_map);
  // Rows of a warp are rescaled together, so what unused rows hold must not differ from run to run.
  clear_unused_rows<C::kBlockM, C::kD, C::kThreads>(smem.q(), p.work.rows, threadIdx.x);
  __syncthreads();
  const auto compute = [&] {
    if (uniform(threadIdx.x / 128) == 1)
      compute_latents<C, 0>(p, smem);
    else
      compute_latents<C, 1>(p, smem);
  };
  split_roles<C>([&] { feed_latents<C>(p, smem); }, compute);
}

}  // namespace magi
