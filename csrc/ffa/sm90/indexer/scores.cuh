// SPDX-License-Identifier: Apache-2.0
// Scores of an indexer: sum over heads of weight * relu(q . k), float32. A CTA holds the heads of
// some queries and takes the blocks of keys that one of these queries sees: products have keys as
// rows and heads as columns, so a thread adds up the heads of a key in registers. Every query meets
// the same instructions wherever it is in its tile, so a score has the same bits for any cut of
// queries and keys.
#pragma once

#include <climits>

#include "device/mbarrier.cuh"
#include "device/ring.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

constexpr uint32_t kWholeWarp = 0xffffffffu;

template <typename C>
struct IndexerSmem {
  uint32_t base;

  __device__ uint32_t q(uint32_t stage) const { return base + C::kQAt + stage * C::kQBytes; }
  __device__ uint32_t k(uint32_t stage) const { return base + C::kKAt + stage * C::kKBytes; }
  __device__ uint32_t weights(uint32_t stage) const {
    return base + C::kWeightsAt + stage * C::kColumns * 4;
  }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full(uint32_t s) const { return bar(s); }
  __device__ uint32_t q_empty(uint32_t s) const { return bar(C::kQStages + s); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(2 * C::kQStages + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(2 * C::kQStages + C::kKStages + s); }
  // A warpgroup may start its product.
  __device__ uint32_t turn(int group) const {
    return bar(2 * C::kQStages + 2 * C::kKStages + group);
  }

  __device__ void init_barriers() const {
    constexpr int kWarps = C::kConsumers / 32;
    for (uint32_t s = 0; s < C::kQStages; ++s) {
      mbar_init(q_full(s), 1);
      mbar_init(q_empty(s), kWarps);
    }
    for (uint32_t s = 0; s < C::kKStages; ++s) {
      mbar_init(k_full(s), 1);
      mbar_init(k_empty(s), kWarps);
    }
    for (int group = 0; group < C::kGroups; ++group) mbar_init(turn(group), 4);
    mbar_init_fence();
  }
};

// The work items of a CTA: span by span of the keys, and in each from the last queries on, which
// see most keys of a causal mask. Rounds go forward and backward in turn, so that no CTA has the
// longest item of each. A whole warp asks for them. What the next item needs is read early.
template <typename C>
struct IndexerItems {
  const IndexerParams& p;
  const int num_tiles, num_items;
  int round = 0;
  int tile;         // -1 where there are no more
  int first_block;  // of the span
  int2 next;        // bounds of this lane's query in `tile`

  __device__ explicit IndexerItems(const IndexerParams& params)
      : p(params),
        num_tiles((params.num_queries + C::kQueries - 1) / C::kQueries),
        num_items(num_tiles * indexer_spans(params.pitch)) {
    look_up();
  }

  __device__ __forceinline__ void look_up() {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int number = round * ctas + (round % 2 ? ctas - 1 - cta : cta);
    const int span = number / num_tiles;
    first_block = span * kIndexerSpanBlocks;
    tile = number < num_items ? num_tiles - 1 - (number - span * num_tiles) : -1;
    const int query = tile * C::kQueries + threadIdx.x % 32;
    next = make_int2(INT_MAX, 0);
    if (tile < 0 || threadIdx.x % 32 >= C::kQueries || query >= p.num_queries) return;
    const int64_t* at = p.bounds + 2 * (static_cast<int64_t>(p.first_query) + query);
    const int64_t low = at[0] > 0 ? at[0] : 0, high = at[1] < p.total_k ? at[1] : p.total_k;
    if (low < high) next = make_int2(static_cast<int>(low), static_cast<int>(high));
  }

  // The first block of keys, and the one behind the last. Then `tile` is the next one.
  __device__ __forceinline__ int2 take() {
    const int low = __reduce_min_sync(kWholeWarp, next.x);
    const int high = __reduce_max_sync(kWholeWarp, next.y);
    const int2 span = make_int2(first_block, first_block + kIndexerSpanBlocks);
    ++round;
    look_up();
    if (low >= high) return make_int2(0, 0);
    const int begin = max(low / C::kBlockKeys, span.x);
    const int end = min((high - 1) / C::kBlockKeys + 1, span.y);
    return begin < end ? make_int2(begin, end) : make_int2(0, 0);
  }
};

// One warp.
template <typename C>
__device__ void copy_indexer(const IndexerParams& p, const IndexerSmem<C>& smem) {
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  IndexerItems<C> items(p);
  while (items.tile >= 0) {
    const int query = p.first_query + items.tile * C::kQueries;
    const int2 blocks = items.take();
    if (blocks.x == blocks.y) continue;
    if (threadIdx.x % 32 == 0) {
      mbar_wait(smem.q_empty(qs.stage), qs.phase ^ 1);
      mbar_expect(smem.q_full(qs.stage), C::kQBytes);
#pragma unroll 1
      for (int i = 0; i < C::kQueries; ++i)
#pragma unroll
        for (int atom = 0; atom < C::kAtoms; ++atom)
          load_tile_3d(smem.q(qs.stage) + (atom * C::kColumns + i * C::kHeads) * 128, &p.q_map,
                       smem.q_full(qs.stage), atom * 64, 0, query + i, kEvictFirst);
#pragma unroll 1
      for (int block = blocks.x; block < blocks.y; ++block) {
        mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
        mbar_expect(smem.k_full(ks.stage), C::kKBytes);
#pragma unroll
        for (int atom = 0; atom < C::kAtoms; ++atom)
          load_tile_3d(smem.k(ks.stage) + atom * C::kBlockKeys * 128, &p.k_map,
                       smem.k_full(ks.stage), atom * 64, block * C::kBlockKeys, 0, kEvictLast);
        ks.advance();
      }
    }
    __syncwarp();
    qs.advance();
  }
}

// dots = K Q^T, of the 64 keys of a warpgroup. k and q are low words of descriptors.
template <typename C>
__device__ __forceinline__ void multiply_heads(float (&dots)[C::kColumns / 2], uint32_t k,
                                               uint32_t q) {
  using Mma = Wgmma<typename C::T, C::kColumns, 0>;
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int in_atom = step % 4 * 32, atom = step / 4;
    Mma::ss(dots, operand(k, (atom * C::kBlockKeys * 128 + in_atom) / 16),
            operand(q, (atom * C::kColumns * 128 + in_atom) / 16), step > 0);
  }
}

// Adds up the heads of two keys for each query, and writes the scores.
template <typename C>
__device__ __forceinline__ void write_scores(const IndexerParams& p,
                                             const float (&dots)[C::kColumns / 2], uint32_t weights,
                                             int first_query, int key) {
  constexpr int kOctets = C::kHeads / 8;  // of the columns of a query
  const int lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
  for (int i = 0; i < C::kQueries; ++i) {
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int j = i * kOctets; j < (i + 1) * kOctets; ++j) {
      const float2 w = lds_float2(weights + 4 * (8 * j + 2 * quarter));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // NaN stays NaN.
        const float a = dots[4 * j + 2 * r], b = dots[4 * j + 2 * r + 1];
        sums[r] = fmaf(a < 0.f ? 0.f : a, w.x, sums[r]);
        sums[r] = fmaf(b < 0.f ? 0.f : b, w.y, sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] += __shfl_xor_sync(kWholeWarp, sums[r], 1);
      sums[r] += __shfl_xor_sync(kWholeWarp, sums[r], 2);
    }
    if (quarter == i % 4 && first_query + i < p.num_queries) {
      float* to = p.scores + (first_query + i) * p.pitch + key;
      to[0] = sums[0];
      to[8] = sums[1];
    }
  }
}

// A consumer warpgroup. The two take turns: one has the tensor cores while the other adds up.
template <typename C>
__device__ void score_keys(const IndexerParams& p, const IndexerSmem<C>& smem, int group) {
  float dots[C::kColumns / 2];
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  uint32_t turns = 0;  // that this warpgroup had
  IndexerItems<C> items(p);
  const int lane = threadIdx.x % 32;
  const int key_of_thread = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  // The weight of a thread's column in a tile.
  auto weight_of = [&](int tile) {
    const int query = tile * C::kQueries + static_cast<int>(threadIdx.x) / C::kHeads;
    const int head = threadIdx.x % C::kHeads;
    if (tile < 0 || query >= p.num_queries || head >= p.heads) return 0.f;
    return p.weights[(static_cast<int64_t>(p.first_query) + query) * p.heads + head];
  };
  static_assert(C::kConsumers == C::kColumns, "a thread brings the weight of one column");
  float weight = weight_of(items.tile);
  while (items.tile >= 0) {
    const int first_query = items.tile * C::kQueries;
    const float mine = weight;
    const int2 blocks = items.take();
    weight = weight_of(items.tile);
    if (blocks.x == blocks.y) continue;
    const uint32_t weights = smem.weights(qs.stage);
    sts_int(weights + 4 * threadIdx.x, __float_as_int(mine));
    named_barrier(1, C::kConsumers);
    mbar_wait(smem.q_full(qs.stage), qs.phase);
    const uint32_t q = uniform(operand_low(smem.q(qs.stage), 16));
#pragma unroll 1
    for (int block = blocks.x; block < blocks.y; ++block) {
      mbar_wait(smem.k_full(ks.stage), ks.phase);
      mbar_wait(smem.turn(group), (turns & 1) ^ (group == 0));
      ++turns;
      __syncwarp();
      wgmma_fence();
      multiply_heads<C>(dots, uniform(operand_low(smem.k(ks.stage) + group * 64 * 128, 16)), q);
      wgmma_commit();
      if (elect_one()) mbar_arrive(smem.turn(group ^ 1));
      wgmma_wait<0>();
      keep_in_place(dots);
      if (elect_one()) mbar_arrive(smem.k_empty(ks.stage));
      ks.advance();
      write_scores<C>(p, dots, weights, first_query, block * C::kBlockKeys + key_of_thread);
    }
    __syncwarp();
    if (elect_one()) mbar_arrive(smem.q_empty(qs.stage));
    qs.advance();
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    indexer_scores(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const IndexerSmem<C> smem{smem_addr(raw)};
  if (threadIdx.x == 0) {
    smem.init_barriers();
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_map);
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128);
  if (group == C::kGroups)
    copy_indexer<C>(p, smem);
  else
    score_keys<C>(p, smem, group);
}

}  // namespace magi
