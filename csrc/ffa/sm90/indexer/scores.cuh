// SPDX-License-Identifier: Apache-2.0
// Scores of an indexer, float32: sum over heads of weight * relu(q . k), or q . k of each head. A
// CTA holds the heads of some queries and takes the key tiles that one of these queries sees.
// Every query meets the same instructions wherever it is in its tile, so a score has the same bits
// for any cut of queries and keys.
#pragma once

#include <climits>

#include "device/mbarrier.cuh"
#include "device/ring.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "ffa/sm90/indexer/added_heads.cuh"
#include "ffa/sm90/indexer/head_maxima.cuh"
#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

template <typename C>
struct IndexerSmem {
  uint32_t base;

  __device__ uint32_t q(uint32_t stage) const { return base + C::kQAt + stage * C::kQBytes; }
  __device__ uint32_t k(uint32_t stage) const { return base + C::kKAt + stage * C::kKBytes; }
  __device__ uint32_t weights(uint32_t stage) const {
    return base + C::kWeightsAt + stage * C::kQueryHeads * 4;
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
  int tile;        // -1 where there are no more
  int first_tile;  // of keys in the span
  int2 next;       // bounds of this lane's query in `tile`

  __device__ explicit IndexerItems(const IndexerParams& params)
      : p(params),
        num_tiles((params.num_queries + C::kQueries - 1) / C::kQueries),
        num_items(num_tiles * indexer_spans(params.total_k)) {
    look_up();
  }

  __device__ __forceinline__ void look_up() {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int number = round * ctas + (round % 2 ? ctas - 1 - cta : cta);
    const int span = number / num_tiles;
    first_tile = span * kIndexerSpanTiles;
    tile = number < num_items ? num_tiles - 1 - (number - span * num_tiles) : -1;
    const int query = tile * C::kQueries + threadIdx.x % 32;
    next = make_int2(INT_MAX, 0);
    if (tile < 0 || threadIdx.x % 32 >= C::kQueries || query >= p.num_queries) return;
    const int2 seen = visible_keys(p, static_cast<int64_t>(p.first_query) + query);
    if (seen.x < seen.y) next = seen;
  }

  // The first key tile, and the one behind the last. Then `tile` is the next one.
  __device__ __forceinline__ int2 take() {
    const int low = __reduce_min_sync(kWholeWarp, next.x);
    const int high = __reduce_max_sync(kWholeWarp, next.y);
    const int2 span = make_int2(first_tile, first_tile + kIndexerSpanTiles);
    ++round;
    look_up();
    if (low >= high) return make_int2(0, 0);
    const int begin = max(low / C::kTileKeys, span.x);
    const int end = min((high - 1) / C::kTileKeys + 1, span.y);
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
    const int2 key_tiles = items.take();
    if (key_tiles.x == key_tiles.y) continue;
    if (threadIdx.x % 32 == 0) {
      mbar_wait(smem.q_empty(qs.stage), qs.phase ^ 1);
      mbar_expect(smem.q_full(qs.stage), C::kQBytes);
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
        load_tile_3d(smem.q(qs.stage) + atom * C::kQueryHeads * 128, &p.q_map,
                     smem.q_full(qs.stage), atom * 64, 0, query, kEvictFirst);
#pragma unroll 1
      for (int key_tile = key_tiles.x; key_tile < key_tiles.y; ++key_tile) {
        mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
        mbar_expect(smem.k_full(ks.stage), C::kKBytes);
#pragma unroll
        for (int atom = 0; atom < C::kAtoms; ++atom)
          load_tile_3d(smem.k(ks.stage) + atom * C::kTileKeys * 128, &p.k_map,
                       smem.k_full(ks.stage), atom * 64, key_tile * C::kTileKeys, 0, kEvictLast);
        ks.advance();
      }
    }
    __syncwarp();
    qs.advance();
  }
}

// A consumer warpgroup. The two take turns: one has the tensor cores while the other is busy with
// its scores.
template <typename C, typename Consumer>
__device__ void score_keys(const IndexerParams& p, const IndexerSmem<C>& smem, int group) {
  typename Consumer::Dots dots;
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  uint32_t turns = 0;  // that this warpgroup had
  IndexerItems<C> items(p);
  Consumer consumer(p, group, items.tile);
  while (items.tile >= 0) {
    const int tile = items.tile;
    const int2 seen = items.next;
    const int2 key_tiles = items.take();
    consumer.look_up(items.tile);
    if (key_tiles.x == key_tiles.y) continue;
    consumer.begin(tile, seen, key_tiles.x * C::kTileKeys, smem.weights(qs.stage));
    mbar_wait(smem.q_full(qs.stage), qs.phase);
    const uint32_t q = uniform(operand_low(smem.q(qs.stage) + group * Consumer::kQStep, 16));
#pragma unroll 1
    for (int key_tile = key_tiles.x; key_tile < key_tiles.y; ++key_tile) {
      mbar_wait(smem.k_full(ks.stage), ks.phase);
      mbar_wait(smem.turn(group), (turns & 1) ^ (group == 0));
      ++turns;
      __syncwarp();
      const uint32_t k = uniform(operand_low(smem.k(ks.stage) + group * Consumer::kKStep, 16));
      wgmma_fence();
      Consumer::multiply(dots, k, q);
      wgmma_commit();
      if (elect_one()) mbar_arrive(smem.turn(group ^ 1));
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < Consumer::kProducts; ++i) keep_in_place(dots[i]);
      if (elect_one()) mbar_arrive(smem.k_empty(ks.stage));
      ks.advance();
      consumer.write(dots, key_tile * C::kTileKeys);
    }
    consumer.end();
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
  else if constexpr (C::kForm == IndexerForm::kBlocksOfHeads)
    score_keys<C, HeadMaxima<C>>(p, smem, group);
  else
    score_keys<C, AddedHeads<C>>(p, smem, group);
}

}  // namespace magi
