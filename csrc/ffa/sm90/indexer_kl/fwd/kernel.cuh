// SPDX-License-Identifier: Apache-2.0
// Forward of the indexer's divergence for sm_90a. A CTA takes query after query. Of a block of 64
// listed keys a warpgroup makes the scores of the indexer and the targets, which are the
// probabilities of attention added over heads: products have keys as rows and heads as columns. Two
// warpgroups take the blocks in turn, so that one multiplies while the other has exponents to make.
// Rows come in atoms of 64 columns.
#pragma once

#include "ffa/sm90/index/mla/gather.cuh"
#include "ffa/sm90/index/tile_walk.cuh"
#include "ffa/sm90/index/warp_roles.cuh"
#include "ffa/sm90/indexer_kl/fwd/config.h"
#include "ffa/sm90/indexer_kl/fwd/totals.cuh"
#include "ffa/sm90/indexer_kl/scores.cuh"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

// The queries of a CTA and how many keys each has, taken by a whole warp. Where an lse is -inf, as
// of pad rows, a query has none, and what is in its rows is not looked at. What the next one needs
// is read early.
template <typename C>
struct KlQueries {
  static constexpr int kOfLane = kKlMostHeads / 32;

  const IndexerKlFwdParams& p;
  TileWalk walk;
  int query, count;     // of the one that was taken
  float next[kOfLane];  // lse of the next one
  int next_count;

  __device__ explicit KlQueries(const IndexerKlFwdParams& params)
      : p(params), walk(params.index.total_q) {
    look_up();
  }

  __device__ __forceinline__ void look_up() {
    if (walk.is_over()) return;
    next_count = __ldg(p.index.lists.key_counts + walk.number);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int head = threadIdx.x % 32 + 32 * i;
      const int64_t at = static_cast<int64_t>(walk.number) * p.heads_q + head;
      next[i] = head < p.heads_q ? __ldg(p.lse + at) : 0.f;
    }
  }

  __device__ __forceinline__ bool take() {
    if (walk.is_over()) return false;
    bool is_dead = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) is_dead |= next[i] == -INFINITY;
    query = walk.number;
    count = __any_sync(0xffffffff, is_dead) ? 0 : next_count;
    walk.advance();
    look_up();
    return true;
  }
};

// Queries of attention and of the indexer, lse and weights. Rows behind the heads of a kv head get
// targets of 0 by an lse of infinity.
template <typename C>
__device__ __forceinline__ void load_kl_query(const IndexerKlFwdParams& p,
                                              const IndexerKlFwdSmem<C>& smem, int query) {
  const int group = p.heads_q / p.heads_kv;
  if (threadIdx.x == 0) {
    mbar_expect(smem.q_full(),
                p.heads_kv * p.atoms * C::kQAtomBytes + p.index_atoms * kKlAtomBytes);
    for (int atom = 0; atom < p.index_atoms; ++atom)
      load_tile_3d(smem.q_index() + atom * kKlAtomBytes, &p.index.q_map, smem.q_full(), atom * 64,
                   0, query, kEvictFirst);
    uint32_t to = smem.q();
    for (int head = 0; head < p.heads_q; head += group)
      for (int atom = 0; atom < p.atoms; ++atom, to += C::kQAtomBytes)
        load_tile_3d(to, &p.q_map, smem.q_full(), atom * 64, head, query, kEvictFirst);
  }
  for (int row = threadIdx.x; row < p.heads_kv * C::kHeads; row += C::kProducers) {
    const int in_group = row % C::kHeads;
    const int64_t head = static_cast<int64_t>(query) * p.heads_q + row / C::kHeads * group;
    const float lse = in_group < group ? __ldg(p.lse + head + in_group) * kLog2e : INFINITY;
    sts_int(smem.lse() + 4 * row, __float_as_int(lse));
  }
  load_weight(p.index, smem.weights(), query);
  mbar_arrive(smem.q_full());
  __syncwarp();
}

// One warpgroup.
template <typename C>
__device__ void feed_kl(const IndexerKlFwdParams& p, const IndexerKlFwdSmem<C>& smem) {
  uint32_t loaded = 0, q_phase = 0;  // atoms so far
  KlQueries<C> queries(p);
#pragma unroll 1
  while (queries.take()) {
    const int query = queries.query;
    if (queries.count == 0) continue;
    const KeyList list(p.index.lists, query);
    LatentGather index_rows(list, p.index.k, threadIdx.x), rows(list, p.k, threadIdx.x);
    // Q waits for the end of the query before, so keys come first.
    uint32_t left = C::kStages;  // atoms until Q
    const auto ask_q = [&] {
      mbar_wait(smem.q_empty(), q_phase ^ 1);
      load_kl_query(p, smem, query);
      q_phase ^= 1;
    };
    const auto load = [&](const LatentGather& from, int atom) {
      const uint32_t stage = loaded % C::kStages;
      mbar_wait(smem.k_empty(stage), (loaded / C::kStages & 1) ^ 1);
      from.load_atom(smem.k(stage) - atom * kKlAtomBytes, atom);
      async_copies_arrive(smem.k_full(stage));
      ++loaded;
      if (left > 0 && --left == 0) ask_q();
    };
#pragma unroll 1
    while (!rows.is_over()) {
      index_rows.next_block(0);
      rows.next_block(0);
#pragma unroll 1
      for (int atom = 0; atom < p.index_atoms; ++atom) load(index_rows, atom);
#pragma unroll 1
      for (int atom = 0; atom < p.heads_kv * p.atoms; ++atom) load(rows, atom);
    }
    if (left > 0) ask_q();
  }
  async_copies_wait_all();
}

// A consumer warpgroup, which takes every second block.
template <typename C>
struct IndexerKlFwdWorker {
  using T = typename C::T;

  const IndexerKlFwdParams& p;
  const IndexerKlFwdSmem<C>& smem;
  const int group;
  uint32_t blocks = 0, read = 0;  // and atoms so far, of both warpgroups

  __device__ IndexerKlFwdWorker(const IndexerKlFwdParams& params, const IndexerKlFwdSmem<C>& s,
                                int g)
      : p(params), smem(s), group(g) {}

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (elect_one()) mbar_arrive(bar);
  }

  // x = keys heads^T, of the next `atoms` atoms of keys. `q`: rows of kN heads in atoms, too.
  // `is_last`: the block has no more.
  template <int kN>
  __device__ __forceinline__ void multiply(float (&x)[kN / 2], uint32_t q, int atoms,
                                           bool is_last) {
    using Mma = Wgmma<T, kN, 0>;
    const uint32_t b = uniform(operand_low(q, 16));
#pragma unroll 1
    for (int atom = 0; atom < atoms; ++atom, ++read) {
      const uint32_t stage = read % C::kStages;
      mbar_wait(smem.k_full(stage), read / C::kStages & 1);
      fence_async_proxy();
      __syncwarp();
      const uint32_t a = uniform(operand_low(smem.k(stage), 16));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma::ss(x, operand(a, step * 32 / 16), operand(b, (atom * kN * 128 + step * 32) / 16),
                atom > 0 || step > 0);
      wgmma_commit();
      if (atom == 0) continue;
      wgmma_wait<1>();
      release(smem.k_empty((read - 1) % C::kStages));
    }
    if (is_last) release(smem.turn(group ^ 1));
    wgmma_wait<0>();
    keep_in_place(x);
    release(smem.k_empty((read - 1) % C::kStages));
  }

  __device__ __forceinline__ void make_scores(float (&scores)[2]) {
    float dots[kKlHeads / 2];
    multiply<kKlHeads>(dots, smem.q_index(), p.index_atoms, false);
    add_up_heads(dots, smem.weights(), scores);
  }

  __device__ __forceinline__ void make_targets(float (&targets)[2]) {
    targets[0] = targets[1] = 0.f;
#pragma unroll 1
    for (int kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
      float s[C::kHeads / 2];
      multiply<C::kHeads>(s, smem.q() + kv_head * p.atoms * C::kQAtomBytes, p.atoms,
                          kv_head == p.heads_kv - 1);
      const uint32_t rows = smem.lse() + 4 * (kv_head * C::kHeads + 2 * (threadIdx.x % 4));
#pragma unroll
      for (int j = 0; j < C::kHeads / 8; ++j) {
        const float2 lse = lds_float2(rows + 32 * j);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          targets[r] += exp2_fast(s[4 * j + 2 * r] * p.scale_log2 - lse.x);
          targets[r] += exp2_fast(s[4 * j + 2 * r + 1] * p.scale_log2 - lse.y);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) targets[r] = sum_of_row(targets[r]);
  }

  // The keys from place `first` on, if they are this warpgroup's. A barrier tells phases apart only
  // from the next ones, so the atoms before those of a block must be known to have come.
  __device__ __forceinline__ void block(KlTotals& totals, int query, int first, int count) {
    const uint32_t number = blocks++;
    if (number % 2 != group) {
      read += p.index_atoms + p.heads_kv * p.atoms;
      return;
    }
    mbar_wait(smem.turn(group), (number / 2 & 1) ^ (group == 0));
    float scores[2], targets[2];
    make_scores(scores);
    make_targets(targets);
    float* row = p.targets + static_cast<int64_t>(query) * p.index.lists.max_entries;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = first + upper_row_of_thread() + 8 * r;
      if (place >= count) continue;
      totals.add(targets[r], scores[r]);
      if (threadIdx.x % 4 == 0) row[place] = targets[r];
    }
  }

  // The sums of all warps. `place` changes from query to query. `is_odd`: did this warpgroup have
  // the odd blocks of the query? So the order of the additions does not depend on other queries.
  __device__ __forceinline__ void write(KlTotals& totals, int query, uint32_t place,
                                        uint32_t is_odd) const {
    const int thread = threadIdx.x - C::kProducers;
    totals.add_rows();
    if (thread % 32 == 0)
      totals.store(smem.sums(place, is_odd * (C::kWarps / 2) + thread / 32 % (C::kWarps / 2)));
    named_barrier(1, C::kConsumers);
    if (thread != 0) return;
    KlTotals all;
    for (int warp = 0; warp < C::kWarps; ++warp) all.add(KlTotals::load(smem.sums(place, warp)));
    write(all, query);
  }

  __device__ __forceinline__ void write(const KlTotals& all, int query) const {
    p.divergence[query] = all.divergence();
    p.lse_index[query] = all.lse();
    p.mass[query] = all.mass;
  }
};

template <typename C>
__device__ void compute_kl(const IndexerKlFwdParams& p, const IndexerKlFwdSmem<C>& smem) {
  IndexerKlFwdWorker<C> worker(p, smem, uniform(threadIdx.x / 128) - 1);
  uint32_t q_phase = 0;
  KlQueries<C> queries(p);
#pragma unroll 1
  while (queries.take()) {
    const int query = queries.query, count = queries.count;
    KlTotals totals;
    if (count == 0) {
      if (threadIdx.x == C::kProducers) worker.write(totals, query);
      __syncwarp();
      continue;
    }
    const uint32_t is_odd = (worker.blocks ^ worker.group) % 2;
    mbar_wait(smem.q_full(), q_phase);
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < count; first += kKlKeys) worker.block(totals, query, first, count);
    worker.release(smem.q_empty());
    worker.write(totals, query, q_phase, is_odd);
    __syncwarp();
    q_phase ^= 1;
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    indexer_kl_fwd(const __grid_constant__ IndexerKlFwdParams p) {
  const auto smem = make_smem<IndexerKlFwdSmem<C>>(p.index.q_map, p.q_map);
  __syncthreads();
  split_roles<C>([&] { feed_kl<C>(p, smem); }, [&] { compute_kl<C>(p, smem); });
}

}  // namespace magi
