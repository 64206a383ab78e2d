// SPDX-License-Identifier: Apache-2.0
// A CTA of the backward at work on a work tile: what it copies, scores, adds and writes.
#pragma once

#include "ffa/common/dropout.cuh"
#include "ffa/common/softmax.cuh"
#include "ffa/portable/bwd/products.cuh"
#include "ffa/portable/bwd/rows.cuh"
#include "ffa/portable/bwd/steps.cuh"
#include "ffa/portable/copy.cuh"

namespace magi::portable {

template <typename C>
struct BwdWorker {
  using T = typename C::T;
  const BwdKernelParams& p;
  uint32_t smem;
  float dk[C::kAtoms][C::kColumns / 2], dv[C::kAtoms][C::kColumns / 2];

  __device__ __forceinline__ BwdWorker(const BwdKernelParams& params, uint32_t at)
      : p(params), smem(at) {}

  // The warp's place in scores, dk and dv, and in dq.
  static __device__ __forceinline__ int key0() {
    return uniform(thread_again() / 32) % C::kKeyWarps * (16 * C::kAtoms);
  }
  static __device__ __forceinline__ int query0() {
    return uniform(thread_again() / 32) / C::kKeyWarps * C::kQueries;
  }
  static __device__ __forceinline__ int column0() {
    return uniform(thread_again() / 32) / C::kKeyWarps * C::kColumns;
  }
  static __device__ __forceinline__ int dq_row0() {
    return uniform(thread_again() / 32) % C::kDqRowWarps * (16 * C::kDqAtoms);
  }
  static __device__ __forceinline__ int dq_column0() {
    return uniform(thread_again() / 32) / C::kDqRowWarps * C::kDqColumns;
  }
  __device__ __forceinline__ uint32_t q(int stage) const {
    return smem + C::kQAt + stage * C::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t dout(int stage) const {
    return smem + C::kDoAt + stage * C::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t stats(int stage) const {
    return smem + C::kStatsAt + stage * C::kStatBytes;
  }

  __device__ __forceinline__ void copy_key_tiles(int tile, int kv_head) const {
    const int row = tile * C::kBlockN;
    copy_rows<C::kBlockN, C::kD, C::kThreads>(
        smem + C::kKAt, static_cast<const T*>(p.k) + kv_head * p.k_stride_head, p.k_stride_token,
        p.head_dim, row, p.total_k);
    copy_rows<C::kBlockN, C::kD, C::kThreads>(
        smem + C::kVAt, static_cast<const T*>(p.v) + kv_head * p.v_stride_head, p.v_stride_token,
        p.head_dim_v, row, p.total_k);
  }

  // What a step needs.
  __device__ __forceinline__ void copy_queries(Step step, int stage) const {
    if (step.block < 0) return;
    const int row = step.block * C::kBlockM, head = head_of(step.segment);
    copy_rows<C::kBlockM, C::kD, C::kThreads>(q(stage),
                                              static_cast<const T*>(p.q) + head * p.q_stride_head,
                                              p.q_stride_token, p.head_dim, row, p.total_q);
    copy_rows<C::kBlockM, C::kD, C::kThreads>(
        dout(stage), static_cast<const T*>(p.dout) + head * p.dout_stride_head, p.dout_stride_token,
        p.head_dim_v, row, p.total_q);
    const float* from = p.stats + block_number(step) * (2 * C::kBlockM);
    for (int i = thread_again(); i < C::kBlockM / 2; i += C::kThreads)
      copy_chunk(stats(stage) + 16 * i, from + 4 * i, true);
    copy_commit();
  }

  // Number of a block among those of all heads.
  __device__ __forceinline__ int64_t block_number(Step step) const {
    return static_cast<int64_t>(head_of(step.segment)) * p.num_m_blocks + step.block;
  }

  // Zeroes rows of K and V that no query sees: nothing of them may reach a product.
  __device__ __forceinline__ void zero_unseen_keys(int tile) const {
    const PlanReader plan{p.plan};
    const magi_tile_desc& desc = plan.tile(tile);
    for (int row = threadIdx.x; row < C::kBlockN; row += C::kThreads) {
      bool seen = false;
      for (int i = 0; i < desc.num_segments && !seen; ++i) {
        const int2 queries = reinterpret_cast<const int2*>(plan.record(desc.segment_begin + i) +
                                                           kSegmentHeaderWords)[row];
        seen = queries.x < queries.y;
      }
      if (seen) continue;
      zero_row<C::kBlockN, C::kD>(smem + C::kKAt, row);
      zero_row<C::kBlockN, C::kD>(smem + C::kVAt, row);
    }
  }

  // For each key of the tile the queries [first, end) that see it.
  __device__ __forceinline__ const int2* intervals_of(uint32_t segment) const {
    return reinterpret_cast<const int2*>(p.plan + record_of(segment) + kSegmentHeaderWords);
  }

  // The same of queries that no key of the tile sees in this segment.
  __device__ __forceinline__ void zero_unseen_queries(Step step, int stage) const {
    const int2* rows = intervals_of(step.segment);
    for (int row = threadIdx.x; row < C::kBlockM; row += C::kThreads) {
      const int query = step.block * C::kBlockM + row;
      bool seen = false;
#pragma unroll 1
      for (int key = 0; key < C::kBlockN && !seen; ++key)
        seen = query >= rows[key].x && query < rows[key].y;
      if (seen) continue;
      zero_row<C::kBlockM, C::kD>(q(stage), row);
      zero_row<C::kBlockM, C::kD>(dout(stage), row);
      sts_int(stats(stage) + 4 * (C::kBlockM + row), 0);  // delta, which may be anything, too
    }
  }

  // P and dS of the warp's part, rounded, to shared memory.
  __device__ __forceinline__ void score(Step step, int stage) const {
    const int lane = thread_again() % 32, first_key = key0(), first_query = query0();
    float s[C::kAtoms][C::kQueries / 2], dp[C::kAtoms][C::kQueries / 2];
    clear(s);
    multiply_rows<T, C::kD, C::kBlockN, C::kBlockM>(
        s, straight_lane<128>(smem + C::kKAt + first_key * 128, lane),
        crossed_lane<128>(q(stage) + first_query * 128, lane));
    clear(dp);
    multiply_rows<T, C::kD, C::kBlockN, C::kBlockM>(
        dp, straight_lane<128>(smem + C::kVAt + first_key * 128, lane),
        crossed_lane<128>(dout(stage) + first_query * 128, lane));
    const int q0 = step.block * C::kBlockM + first_query;
    const int2 full = full_of(step.segment, first_key / (C::kBlockN / C::kGroups));
    const bool masked = q0 < full.x || q0 + C::kQueries > full.y;
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom) {
      if (p.has_softcap) {
#pragma unroll
        for (int i = 0; i < C::kQueries / 2; ++i) s[atom][i] = tanh_fast(s[atom][i] * p.scale);
      }
      if (masked) {
        const int2* rows = intervals_of(step.segment) + first_key + 16 * atom + lane / 4;
        const int2 queries[2] = {rows[0], rows[8]};
        mask_scores<C::kQueries>(s[atom], q0, queries, lane);
      }
    }
    Staying<C::kQueries> staying[C::kAtoms];
    if constexpr (C::kDropout) {
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
        staying[atom] = drop(dp[atom], first_key + 16 * atom, q0, head_of(step.segment), lane);
    }
    write_scores(s, dp, staying, first_key, first_query, stage, lane);
  }

  // Which pairs of 16 keys stay; dP of the others becomes 0.
  __device__ __forceinline__ Staying<C::kQueries> drop(float (&dp)[C::kQueries / 2], int first_key,
                                                       int q0, int head, int lane) const {
    const int key = TileHeads::load<C>(smem).tile * C::kBlockN + first_key + lane / 4;
    const uint32_t k_hashes[2] = {dropout_k_hash(p.dropout, key, p.total_k),
                                  dropout_k_hash(p.dropout, key + 8, p.total_k)};
    const auto staying =
        staying_queries<C::kQueries>(p.dropout, k_hashes, q0, p.total_q, head, lane);
#pragma unroll
    for (int i = 0; i < C::kQueries / 2; ++i) dp[i] = staying.has(i) ? dp[i] : 0.f;
    return staying;
  }

  // The swizzle of a lane's rows is that of the lane, since they lie multiples of 8 apart.
  // `staying`: with dropout.
  __device__ __forceinline__ void write_scores(const float (&s)[C::kAtoms][C::kQueries / 2],
                                               const float (&dp)[C::kAtoms][C::kQueries / 2],
                                               const Staying<C::kQueries> (&staying)[C::kAtoms],
                                               int first_key, int first_query, int stage,
                                               int lane) const {
    constexpr int kRow = C::kScoreRowBytes, kPanel = kRow / 2;  // columns of a panel
    const uint32_t row =
        first_key * kRow + 4 * (lane % 4) + first_query / kPanel * C::kBlockN * kRow;
    const uint32_t lse_at = stats(stage) + 4 * (first_query + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < C::kQueries / 8; ++j) {
      const float2 lse = lds_float2(lse_at + 32 * j);
      const float2 delta = lds_float2(lse_at + 4 * C::kBlockM + 32 * j);
      const uint32_t to = row + 8 * j / kPanel * C::kBlockN * kRow +
                          chunk_at<kRow>(lane / 4, first_query % kPanel / 8 + j % (kPanel / 8));
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float s0 = s[atom][4 * j + 2 * r], s1 = s[atom][4 * j + 2 * r + 1];
          const float p0 = exp2_fast(s0 * p.scale_log2 - lse.x);
          const float p1 = exp2_fast(s1 * p.scale_log2 - lse.y);
          float ds0 = p0 * (dp[atom][4 * j + 2 * r] - delta.x);
          float ds1 = p1 * (dp[atom][4 * j + 2 * r + 1] - delta.y);
          if (p.has_softcap) {  // a masked score is -inf
            ds0 = p0 > 0.f ? ds0 * (1.f - s0 * s0) : 0.f;
            ds1 = p1 > 0.f ? ds1 * (1.f - s1 * s1) : 0.f;
          }
          const uint32_t at = to + (16 * atom + 8 * r) * kRow;
          uint32_t pair = pack_pair<T>(p0, p1);
          if constexpr (C::kDropout) pair &= pair_mask(staying[atom], 4 * j + 2 * r);
          sts_int(smem + C::kPAt + at, pair);
          sts_int(smem + C::kDsAt + at, pack_pair<T>(ds0, ds1));
        }
    }
  }

  __device__ __forceinline__ void add_dq(Step step) const {
    const int lane = thread_again() % 32;
    float d[C::kDqAtoms][C::kDqColumns / 2];
    multiply_dq<C>(d, crossed_lane<C::kScoreRowBytes>(smem + C::kDsAt, lane),
                   straight_lane<128>(smem + C::kKAt, lane), dq_row0(), dq_column0());
    constexpr int kFragments = C::kDqAtoms * (C::kDqColumns / 8);
    const int warp = uniform(thread_again() / 32);
    float* to = p.dq_accum + (block_number(step) * C::kWarps + warp) * kFragments * 128;
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      add_four(to + 128 * i, lane, &d[i / (C::kDqColumns / 8)][i % (C::kDqColumns / 8) * 4]);
  }

  __device__ __forceinline__ void add_dk_dv(int stage) {
    const int lane = thread_again() % 32;
    const uint32_t row = key0() * C::kScoreRowBytes;
    add_key_grads<C>(dv, straight_lane<C::kScoreRowBytes>(smem + C::kPAt + row, lane),
                     straight_lane<128>(dout(stage), lane), column0());
    add_key_grads<C>(dk, straight_lane<C::kScoreRowBytes>(smem + C::kDsAt + row, lane),
                     straight_lane<128>(q(stage), lane), column0());
  }

  __device__ __forceinline__ void write_grads(int tile, int kv_head, int split) const {
    const int lane = thread_again() % 32;
    const int first_key = tile * C::kBlockN + key0(), first_column = column0();  // by whole warps
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = first_key + 16 * atom + lane / 4 + 8 * r;
        if (key >= p.total_k) continue;
        const int64_t row = static_cast<int64_t>(key) * p.heads_kv + kv_head;
#pragma unroll
        for (int j = 0; j < C::kColumns / 8; ++j) {
          const int column = first_column + 8 * j + 2 * (lane % 4), i = 4 * j + 2 * r;
          if (column < p.head_dim)
            write_pair<T>(p.dk, split * p.dk_stride_part + row * p.head_dim + column,
                          make_float2(dk[atom][i] * p.grad_scale, dk[atom][i + 1] * p.grad_scale),
                          p.grads_are_float, p.accumulate);
          if (column < p.head_dim_v)
            write_pair<T>(p.dv, split * p.dv_stride_part + row * p.head_dim_v + column,
                          make_float2(dv[atom][i], dv[atom][i + 1]), p.grads_are_float,
                          p.accumulate);
        }
      }
  }
};

}  // namespace magi::portable
