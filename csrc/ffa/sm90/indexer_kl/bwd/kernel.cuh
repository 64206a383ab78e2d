// SPDX-License-Identifier: Apache-2.0
// Backward of the indexer's divergence for sm_90a. A CTA takes query after query. Of a block of 64
// listed keys it makes the dots and scores again, and from the targets that the forward left the
// gradients of the dots. Those of q_index and the weights stay in registers until the query is
// done, those of k_index leave at once.
#pragma once

#include "device/ring.cuh"
#include "ffa/sm90/index/bwd/shares.cuh"
#include "ffa/sm90/index/mla/gather.cuh"
#include "ffa/sm90/index/mla/products.cuh"
#include "ffa/sm90/index/tile_walk.cuh"
#include "ffa/sm90/index/warp_roles.cuh"
#include "ffa/sm90/indexer_kl/bwd/config.h"
#include "ffa/sm90/indexer_kl/scores.cuh"
#include "ffa/sm90/stage_rows.cuh"

namespace magi {

constexpr int kKlConsumers = 1;  // named barrier

// A query with targets. Others have no gradient, and what is in their rows is not looked at.
__device__ __forceinline__ bool has_targets(const IndexerKlBwdParams& p, int query) {
  return __ldg(p.mass + query) > 0.f;
}

// One warpgroup.
template <typename C>
__device__ void feed_indexer_bwd(const IndexerKlBwdParams& p, const IndexerKlBwdSmem<C>& smem) {
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
#pragma unroll 1
  for (TileWalk walk(p.num_queries); !walk.is_over(); walk.advance()) {
    const int query = p.query_begin + walk.number;
    if (!has_targets(p, query)) continue;
    const KeyList list(p.index.lists, query);
    LatentGather rows(list, p.index.k, threadIdx.x);
    mbar_wait(smem.q_empty(qs.stage), qs.phase ^ 1);
    if (threadIdx.x == 0) {
      mbar_expect(smem.q_full(qs.stage), C::kTileBytes);
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
        load_tile_3d(smem.q(qs.stage) + atom * kKlAtomBytes, &p.index.q_map, smem.q_full(qs.stage),
                     atom * 64, 0, query, kEvictFirst);
    }
    load_weight(p.index, smem.weights(qs.stage), query);
    mbar_arrive(smem.q_full(qs.stage));
    qs.advance();
    __syncwarp();
    for (; !rows.is_over(); ks.advance()) {
      rows.next_block(0);
      mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
      rows.template load<0, C::kAtoms>(smem.k(ks.stage));
      async_copies_arrive(smem.k_full(ks.stage));
    }
  }
  async_copies_wait_all();
}

// Where this thread's two keys are in the list, and what is known of them.
struct KeysOfThread {
  int rows[2];  // of dk, see write_shares
  float targets[2];

  __device__ __forceinline__ KeysOfThread(const IndexerKlBwdParams& p, const KeyList& list,
                                          int number, int first) {
    const int width = p.index.lists.max_entries;
    const float* from = p.targets + static_cast<int64_t>(p.query_begin + number) * width;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = first + upper_row_of_thread() + 8 * r;
      const bool exists = place < list.count;
      const int key = list.key(place), share = exists ? number * width + place : -1;
      rows[r] = p.dk_partials == nullptr ? key : share;
      targets[r] = exists ? __ldg(from + place) : 0.f;
    }
  }
};

// The consumer warpgroup, with a query.
template <typename C>
struct IndexerKlBwdWorker {
  using T = typename C::T;
  using Dots = float[kKlHeads / 2];       // 64 keys, heads
  using Packed = uint32_t[kKlHeads / 4];  // the same in 16 bits
  using Rows = float[C::kD / 2];          // 64 rows of q_index or k_index
  using Weights = float[kKlHeads / 4];    // this thread's columns, added over its keys

  const IndexerKlBwdParams& p;
  const IndexerKlBwdSmem<C>& smem;
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  uint32_t turn = 0;  // of `inner`
  float lse, per_mass, grad;
  float scale;  // of the gradients of dots in 16 bits, in which small ones would vanish

  __device__ IndexerKlBwdWorker(const IndexerKlBwdParams& params, const IndexerKlBwdSmem<C>& s)
      : p(params), smem(s) {}

  __device__ __forceinline__ void begin(int query) {
    lse = __ldg(p.lse_index + query);
    per_mass = 1.f / __ldg(p.mass + query);
    grad = __ldg(p.grad + query);
    mbar_wait(smem.q_full(qs.stage), qs.phase);
    __syncwarp();
    const int2 w = lds_int2(smem.weights(qs.stage) + threadIdx.x % 32 * 8);
    const int largest = max(w.x & 0x7fffffff, w.y & 0x7fffffff);
    const float most = __int_as_float(__reduce_max_sync(0xffffffff, largest));
    scale = most == 0.f ? 1.f : 4096.f / most;
  }

  // The dots of a block.
  __device__ __forceinline__ void multiply_keys(Dots& dots) const {
    mbar_wait(smem.k_full(ks.stage), ks.phase);
    fence_async_proxy();
    __syncwarp();
    wgmma_fence();
    multiply_atoms<T, 0, C::kAtoms>(dots, uniform(operand_low(smem.k(ks.stage), 16)),
                                    uniform(operand_low(smem.q(qs.stage), 16)));
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(dots);
  }

  // Adds to the gradients of weights, which lack the factor grad, and makes those of the dots,
  // which lack it too and have the factor scale.
  __device__ __forceinline__ void make_inner(const Dots& dots, const KeysOfThread& keys,
                                             Weights& dw, Packed& packed) const {
    const uint32_t weights = smem.weights(qs.stage);
    float slope[2];
    add_up_heads(dots, weights, slope);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = exp2_fast((slope[r] - lse) * kLog2e);
      slope[r] = keys.rows[r] < 0 ? 0.f : share - keys.targets[r] * per_mass;
    }
    const float scaled[2] = {slope[0] * scale, slope[1] * scale};
#pragma unroll
    for (int j = 0; j < kKlHeads / 8; ++j) {
      const float2 w = lds_float2(weights + 4 * (8 * j + 2 * (threadIdx.x % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = dots[4 * j + 2 * r], b = dots[4 * j + 2 * r + 1];
        dw[2 * j] = fmaf(slope[r], relu(a), dw[2 * j]);
        dw[2 * j + 1] = fmaf(slope[r], relu(b), dw[2 * j + 1]);
        packed[2 * j + r] =
            pack_pair<T>(a > 0.f ? scaled[r] * w.x : 0.f, b > 0.f ? scaled[r] * w.y : 0.f);
      }
    }
  }

  // For the product whose sums are over keys.
  __device__ __forceinline__ void store_inner(const Packed& packed) const {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = threadIdx.x % 128 / 32 * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < kKlHeads / 8; j += 2) {
      const int chunk = j + (matrix >> 1);
      store_matrix_x4(smem.inner(turn) + row * 128 + ((chunk ^ (row & 7)) << 4), packed[2 * j],
                      packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
    }
    fence_async_proxy();
    named_barrier(kKlConsumers, C::kConsumers);
    wgmma_fence();
  }

  __device__ __forceinline__ void block(Rows& dq, Weights& dw, const KeysOfThread& keys) {
    using Mma = Wgmma<T, C::kD, 1>;
    Packed packed;
    {
      Dots dots;
      multiply_keys(dots);
      make_inner(dots, keys, dw, packed);
    }
    store_inner(packed);
    const uint32_t inner = uniform(operand_low(smem.inner(turn), kKlAtomBytes));
    const uint32_t q = uniform(operand_low(smem.q(qs.stage), kKlAtomBytes));
    const uint32_t k = uniform(operand_low(smem.k(ks.stage), kKlAtomBytes));
    Rows dk;
#pragma unroll
    for (int step = 0; step < kKlHeads / 16; ++step)
      Mma::rs(dk, packed + 4 * step, operand(q, step * 2048 / 16), step > 0);
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < kKlKeys / 16; ++step)
      Mma::template ss<1>(dq, operand(inner, step * 2048 / 16), operand(k, step * 2048 / 16), 1);
    wgmma_commit();
    wgmma_wait<1>();
    keep_in_place(dk);
    const float factor = grad / scale;
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dk[i] *= factor;
    const bool adds = p.dk_partials == nullptr;
    write_shares<C::kD>(dk, keys.rows, adds ? p.dk : p.dk_partials, 0, p.index.head_dim, adds);
    wgmma_wait<0>();
    keep_in_place(dq);
    if (elect_one()) mbar_arrive(smem.k_empty(ks.stage));
    ks.advance();
    turn ^= 1;
  }

  // The sums over keys leave. dq goes by way of the rows of Q, which nobody reads any more then.
  __device__ __forceinline__ void end(const Rows& dq, Weights& dw, int query) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < kKlHeads / 4; ++i) {
#pragma unroll
      for (int far = 4; far < 32; far *= 2) dw[i] += __shfl_xor_sync(0xffffffff, dw[i], far);
    }
    if (lane < 4) {
#pragma unroll
      for (int j = 0; j < kKlHeads / 8; ++j)
        sts_float2(smem.sums(warp) + 4 * (8 * j + 2 * lane), dw[2 * j], dw[2 * j + 1]);
    }
    named_barrier(kKlConsumers, C::kConsumers);
    const float factors[2] = {grad / scale, grad / scale};
    stage_rows<T, C::kD, kKlHeads>(smem.q(qs.stage), dq, factors, warp, lane);
    fence_async_proxy();
    if (thread < p.index.heads) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += __int_as_float(lds_int(smem.sums(i) + 4 * thread));
      p.dweights[static_cast<int64_t>(query) * p.index.heads + thread] = sum * grad;
    }
    named_barrier(kKlConsumers, C::kConsumers);
    if (thread == 0) {
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
        store_tile_3d(&p.dq_map, smem.q(qs.stage) + atom * kKlAtomBytes, atom * 64, 0, query);
      store_commit();
      store_wait_read();
      mbar_arrive(smem.q_empty(qs.stage));
    }
    qs.advance();
  }

  __device__ __forceinline__ void write_zeros(int query) const {
    const int thread = threadIdx.x % 128;
    const int64_t row = static_cast<int64_t>(query) * p.index.heads;
    int4* dq = static_cast<int4*>(p.dq) + row * p.index.head_dim / 8;
    for (int i = thread; i < p.index.heads * p.index.head_dim / 8; i += C::kConsumers)
      dq[i] = make_int4(0, 0, 0, 0);
    if (thread < p.index.heads) p.dweights[row + thread] = 0.f;
  }
};

template <typename C>
__device__ void compute_indexer_grads(const IndexerKlBwdParams& p,
                                      const IndexerKlBwdSmem<C>& smem) {
  IndexerKlBwdWorker<C> worker(p, smem);
#pragma unroll 1
  for (TileWalk walk(p.num_queries); !walk.is_over(); walk.advance()) {
    const int query = p.query_begin + walk.number;
    if (!has_targets(p, query)) {
      worker.write_zeros(query);
      continue;
    }
    const KeyList list(p.index.lists, query);
    typename IndexerKlBwdWorker<C>::Rows dq;
    typename IndexerKlBwdWorker<C>::Weights dw;
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dq[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kKlHeads / 4; ++i) dw[i] = 0.f;
    worker.begin(query);
    KeysOfThread next(p, list, walk.number, 0);
#pragma unroll 1
    for (int first = 0; first < list.count; first += kKlKeys) {
      const KeysOfThread keys = next;
      next = KeysOfThread(p, list, walk.number, first + kKlKeys);  // asked for early
      worker.block(dq, dw, keys);
    }
    worker.end(dq, dw, query);
  }
  if (threadIdx.x % 128 == 0) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    indexer_kl_bwd(const __grid_constant__ IndexerKlBwdParams p) {
  const auto smem = make_smem<IndexerKlBwdSmem<C>>(p.index.q_map, p.dq_map);
  __syncthreads();
  split_roles<C>([&] { feed_indexer_bwd<C>(p, smem); }, [&] { compute_indexer_grads<C>(p, smem); });
}

}  // namespace magi
