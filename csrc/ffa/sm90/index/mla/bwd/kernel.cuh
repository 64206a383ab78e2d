// SPDX-License-Identifier: Apache-2.0
// Backward of index attention in MLA's form for sm_90a: the values are the first columns of the
// keys, and so are their gradients. A work item is one list and 64 query rows that share it. Of a
// block of 64 keys the first consumer warpgroup makes P and the second one dP and dS. Then each
// adds to its columns of dq, which stay in registers, and makes those of dk, which leave at once.
#pragma once

#include "ffa/sm90/index/bwd/shares.cuh"
#include "ffa/sm90/index/mla/bwd/producer.cuh"
#include "ffa/sm90/index/mla/products.cuh"
#include "ffa/sm90/stage_rows.cuh"
#include "ffa/sm90/index/warp_roles.cuh"

namespace magi {

// One consumer warpgroup.
template <typename C, int kGroup>
struct MlaBwdWorker {
  // The named barrier of this warpgroup. Both meet by mbarriers, since each has code of its own and
  // compute-sanitizer takes a named barrier at one place of the code only.
  static constexpr int kOneGroup = 1 + kGroup;
  static constexpr int kFirstAtom = kGroup * C::kOwnAtoms, kEndAtom = C::end_atom(kGroup);
  using Tile = float[32];  // 64 rows, an atom of columns
  using Wide = float[C::kWideColumns / 2];

  const IndexBwdParams& p;
  const MlaBwdSmem<C>& smem;
  uint32_t phase = 0;

  __device__ MlaBwdWorker(const IndexBwdParams& params, const MlaBwdSmem<C>& s)
      : p(params), smem(s) {}

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (elect_one()) mbar_arrive(bar);
  }

  // Until what threads of a warpgroup wrote or copied to shared memory is there for wgmma.
  __device__ __forceinline__ void wait(uint32_t bar) const {
    mbar_wait(bar, phase);
    fence_async_proxy();
    __syncwarp();
    wgmma_fence();
  }

  // Scores, or dP: rows of queries, columns of keys.
  __device__ __forceinline__ void start_scores(Tile& x) const {
    const uint32_t a = uniform(operand_low(kGroup == 0 ? smem.q() : smem.dout(), 16));
    const uint32_t b = uniform(operand_low(smem.k(), 16));
    multiply_part<0>(x, a, b);
    multiply_part<1>(x, a, b);
    if constexpr (kGroup == 0) multiply_part<C::kParts - 1>(x, a, b);
    wgmma_commit();
  }

  template <int kPart>
  __device__ __forceinline__ void multiply_part(Tile& x, uint32_t a, uint32_t b) const {
    wait(smem.k_full(kPart));
    multiply_atoms<typename C::T, C::part_begin(kPart), C::part_end(kPart)>(x, a, b);
  }

  // Columns of dq, from dS of all rows and keys.
  template <int kColumns>
  __device__ __forceinline__ void start_dq(float (&dq)[kColumns / 2], int atom) const {
    using Mma = Wgmma<typename C::T, kColumns, 1>;
    const uint32_t a = uniform(operand_low(smem.ds(), 16));
    const uint32_t b = uniform(operand_low(smem.k() + atom * C::kAtomBytes, C::kAtomBytes));
#pragma unroll
    for (int step = 0; step < C::kBlockN / 16; ++step)
      Mma::ss(dq, operand(a, step * 32 / 16), operand(b, step * 2048 / 16), 1);
  }

  // An atom of dk of the block += weights^T rows: of P and dout, or of dS and Q.
  __device__ __forceinline__ void multiply_dk(Tile& x, uint32_t weights, uint32_t rows, int atom,
                                              bool adds) const {
    using Mma = Wgmma<typename C::T, 64, 1>;
    const uint32_t a = uniform(operand_low(weights, C::kAtomBytes));
    const uint32_t b = uniform(operand_low(rows + atom * C::kAtomBytes, C::kAtomBytes));
#pragma unroll
    for (int step = 0; step < C::kRows / 16; ++step)
      Mma::template ss<1>(x, operand(a, step * 2048 / 16), operand(b, step * 2048 / 16),
                          adds || step > 0);
  }

  // A tile of weights to shared memory: a row for each query.
  __device__ __forceinline__ void store_weights(uint32_t to, const Tile& x) const {
    const float ones[2] = {1.f, 1.f};
    stage_rows<typename C::T, C::kBlockN, C::kRows>(to, x, ones, threadIdx.x % 128 / 32,
                                                    threadIdx.x % 32);
    fence_async_proxy();
    __syncwarp();
  }

  // The upper of this thread's two rows of a tile.
  __device__ __forceinline__ static int upper_row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  // What belongs to it or to the other.
  __device__ __forceinline__ static float of_row(uint32_t values, int which) {
    return __int_as_float(lds_int(values + 4 * (upper_row() + 8 * which)));
  }

  // Scores to P, for both warpgroups. `left`: keys of the block and behind it.
  __device__ __forceinline__ void make_p(Tile& s, int left) const {
    const float lse[2] = {of_row(smem.lse(), 0), of_row(smem.lse(), 1)};
    if (left < C::kBlockN) {
      const int2 keys[2] = {make_int2(0, left), make_int2(0, left)};
      mask_scores<C::kBlockN>(s, 0, keys, threadIdx.x % 32);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = exp2_fast(s[i] * p.scale_log2 - lse[i / 2 % 2]);
    store_weights(smem.p(), s);
    release(smem.p_full());
  }

  // dP to dS times the softmax scale, so that dk and the gradient of values are of one scale.
  __device__ __forceinline__ void make_ds(Tile& dp) const {
    const int lane = threadIdx.x % 32, row = upper_row();
    const float delta[2] = {of_row(smem.delta(), 0), of_row(smem.delta(), 1)};
    wait(smem.p_full());
#pragma unroll
    for (int j = 0; j < C::kBlockN / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t at = smem.p() + (row + 8 * r) * 128 + ((j ^ (row & 7)) << 4) + lane % 4 * 4;
        const float2 weight = unpack_pair<typename C::T>(static_cast<uint32_t>(lds_int(at)));
        float* x = dp + 4 * j + 2 * r;
        x[0] = weight.x * p.scale * (x[0] - delta[r]);
        x[1] = weight.y * p.scale * (x[1] - delta[r]);
      }
    store_weights(smem.ds(), dp);
    release(smem.ds_full());
  }

  // One block of keys. `tail`: dq of the last atom. `rows`: of dk, see write_shares.
  __device__ __forceinline__ void block(Wide& dq, Tile& tail, int left, const int (&rows)[2]) {
    const bool adds = p.dk_partials == nullptr;
    Tile x;
    start_scores(x);
    wgmma_wait<0>();
    keep_in_place(x);
    if constexpr (kGroup == 0) {
      mbar_wait(smem.weights_empty(), phase ^ 1);
      make_p(x, left);
      wait(smem.p_full());
      multiply_dk(x, smem.p(), smem.dout(), kFirstAtom, false);  // while dS is being made
      wgmma_commit();
    } else {
      make_ds(x);
    }
    wait(smem.ds_full());
    start_dq<C::kWideColumns>(dq, kFirstAtom);
    if constexpr (kGroup == 1) start_dq<64>(tail, C::kAtoms - 1);
    wgmma_commit();
#pragma unroll
    for (int atom = kFirstAtom; atom < kEndAtom; ++atom) {
      const bool has_values = atom < C::kValueAtoms, is_first = atom == kFirstAtom;
      wgmma_fence();
      if (has_values && !(kGroup == 0 && is_first))
        multiply_dk(x, smem.p(), smem.dout(), atom, false);
      multiply_dk(x, smem.ds(), smem.q(), atom, has_values);
      wgmma_commit();
      if (is_first) {
        wgmma_wait<1>();
#pragma unroll
        for (int part = kGroup; part < (kGroup == 0 ? 1 : C::kParts); ++part)
          release(smem.k_empty(part));
      }
      wgmma_wait<0>();
      keep_in_place(x);
      if (atom == kEndAtom - 1) release(smem.weights_empty());
      write_shares<64>(x, rows, adds ? p.dk : p.dk_partials, 64 * atom, p.head_dim, adds);
    }
    keep_in_place(dq);
    if constexpr (kGroup == 1) keep_in_place(tail);
    phase ^= 1;
  }

  // dq of the list, by way of the rows of Q, which nobody reads any more after the first barrier.
  __device__ __forceinline__ void write_dq(const Wide& dq, const Tile& tail, const WorkItem& item,
                                           uint32_t item_phase) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const float ones[2] = {1.f, 1.f};
    release(smem.q_unused());
    mbar_wait(smem.q_unused(), item_phase);
    __syncwarp();
    const uint32_t to = smem.q() + kFirstAtom * C::kAtomBytes;
    stage_rows<typename C::T, C::kWideColumns, C::kRows>(to, dq, ones, warp, lane);
    if constexpr (kGroup == 1)
      stage_rows<typename C::T, 64, C::kRows>(to + C::kOwnAtoms * C::kAtomBytes, tail, ones, warp,
                                              lane);
    fence_async_proxy();
    named_barrier(kOneGroup, 128);
    if (thread != 0) return;
    if (item.head < p.work.group && item.token < p.work.total_q)
#pragma unroll
      for (int atom = kFirstAtom; atom < kEndAtom; ++atom)
        store_tile_4d(&p.dq_map, smem.q() + atom * C::kAtomBytes, atom * 64, item.head, item.token,
                      item.tile.kv_head);
    store_commit();
    store_wait_read();
    mbar_arrive(smem.q_empty());
  }
};

template <typename C, int kGroup>
__device__ void compute_latent_grads(const IndexBwdParams& p, const MlaBwdSmem<C>& smem) {
  registers_grow<C::consumer_registers(kGroup)>();
  using Worker = MlaBwdWorker<C, kGroup>;
  Worker worker(p, smem);
  uint32_t item_phase = 0;
#pragma unroll 1
  for (TileWalk walk(p.num_tiles * p.work.groups); !walk.is_over(); walk.advance()) {
    const WorkItem item(p.work, walk.number, p.tile_begin);
    const KeyList list(p.keys, item.tile.list);
    typename Worker::Wide dq;
    typename Worker::Tile tail;
#pragma unroll
    for (int i = 0; i < C::kWideColumns / 2; ++i) dq[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) tail[i] = 0.f;
    mbar_wait(smem.q_full(), item_phase);
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < list.count; first += C::kBlockN) {
      int rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int place = first + Worker::upper_row() + 8 * r, key = list.key(place);
        const int row = p.dk_partials != nullptr
                            ? walk.number * static_cast<int>(p.keys.max_keys()) + place
                            : key * p.work.heads_kv + item.tile.kv_head;
        rows[r] = key < 0 ? -1 : row;
      }
      worker.block(dq, tail, list.count - first, rows);
    }
    worker.write_dq(dq, tail, item, item_phase);
    item_phase ^= 1;
  }
  if (threadIdx.x % 128 == 0) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    index_mla_bwd(const __grid_constant__ IndexBwdParams p) {
  const auto smem = make_smem<MlaBwdSmem<C>>(p.q_map, p.dout_map, p.dq_map);
  __syncthreads();
  if (threadIdx.x < C::kProducers) {
    registers_shrink<C::kProducerRegisters>();
    feed_latents<C>(p, smem);
  } else {
    if (uniform(threadIdx.x / 128) == 1)
      compute_latent_grads<C, 0>(p, smem);
    else
      compute_latent_grads<C, 1>(p, smem);
  }
}

}  // namespace magi
