// SPDX-License-Identifier: Apache-2.0
// Backward of index attention for sm_90a. A work tile is one list of keys and query rows that share
// it. Scores are computed transposed, a row for each key: then P and dS are operands as they lie in
// registers, and dk and dv of a block of keys leave as rows. dq stays in registers until the list
// is over.
#pragma once

#include "device/shared.cuh"
#include "ffa/sm90/index/bwd/producer.cuh"
#include "ffa/sm90/index/bwd/shares.cuh"
#include "ffa/sm90/stage_rows.cuh"
#include "ffa/sm90/index/warp_roles.cuh"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

constexpr int kAllConsumers = 1;  // named barriers: of both consumer warpgroups,
constexpr int kOneWarpgroup = 2;  // and of the first or second of them

// One consumer warpgroup.
template <typename C>
struct IndexBwdWorker {
  static constexpr bool kSplitsKeys = C::kRows == 64;  // dq of both is added at the end of a list
  using Scores = float[C::kRows / 2];
  using Packed = uint32_t[C::kRows / 4];
  using Rows = float[C::kD / 2];

  const IndexBwdParams& p;
  const IndexBwdSmem<C>& smem;
  const int group;  // which of the two
  Ring<C::kStages> stage;

  __device__ IndexBwdWorker(const IndexBwdParams& params, const IndexBwdSmem<C>& s, int g)
      : p(params), smem(s), group(g) {}

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (elect_one()) mbar_arrive(bar);
  }

  // Among the threads that share dS.
  __device__ __forceinline__ void meet() const {
    if constexpr (kSplitsKeys)
      named_barrier(kOneWarpgroup + group, 128);
    else
      named_barrier(kAllConsumers, C::kConsumers);
  }

  // x = rows heads^T: this warpgroup's 64 rows of a block, and all heads.
  __device__ __forceinline__ void start_scores(Scores& x, uint32_t rows, uint32_t heads) const {
    using Mma = Wgmma<typename C::T, C::kRows, 0>;
    const uint32_t a = uniform(operand_low(rows + group * 64 * 128, 16));
    const uint32_t b = uniform(operand_low(heads, 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kD / 16; ++step) {
      const int in_atom = (step % 4) * 32, atom = step / 4;
      Mma::ss(x, operand(a, (atom * C::kBlockN * 128 + in_atom) / 16),
              operand(b, (atom * C::kRows * 128 + in_atom) / 16), step > 0);
    }
    wgmma_commit();
  }

  // x = packed heads: from a weight of every key and head and the rows of all heads.
  __device__ __forceinline__ void start_shares(Rows& x, const Packed& packed,
                                               uint32_t heads) const {
    using Mma = Wgmma<typename C::T, C::kD, 1>;
    const uint32_t b = uniform(operand_low(heads, C::kRows * 128));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kRows / 16; ++step)
      Mma::rs(x, packed + 4 * step, operand(b, step * 2048 / 16), step > 0);
    wgmma_commit();
  }

  // dq += dS K of this warpgroup's heads, or of its keys.
  __device__ __forceinline__ void start_dq(Rows& dq) const {
    using Mma = Wgmma<typename C::T, C::kD, 1>;
    constexpr int kKeys = kSplitsKeys ? 64 : C::kBlockN;
    const uint32_t keys = kSplitsKeys ? group * 64 * 128 : 0;
    const uint32_t heads = kSplitsKeys ? 0 : group * C::kBlockN * 128;
    const uint32_t a = uniform(operand_low(smem.ds() + heads + keys, C::kBlockN * 128));
    const uint32_t b = uniform(operand_low(smem.k(stage.stage) + keys, C::kBlockN * 128));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      Mma::template ss<1>(dq, operand(a, step * 2048 / 16), operand(b, step * 2048 / 16), 1);
    wgmma_commit();
  }

  // Scores and dP to P and dS, packed. `left`: keys of the block and behind it.
  __device__ __forceinline__ void softmax(const Scores& s, const Scores& dp, Packed& weights,
                                          Packed& ds, int left) const {
    const int lane = threadIdx.x % 32;
    const bool exists[2] = {row_in_block() < left, row_in_block() + 8 < left};
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const uint32_t column = 4 * (8 * j + 2 * (lane % 4));
      const float2 lse = lds_float2(smem.lse() + column), delta = lds_float2(smem.delta() + column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float a = exists[r] ? exp2_fast(s[i] * p.scale_log2 - lse.x) : 0.f;
        const float b = exists[r] ? exp2_fast(s[i + 1] * p.scale_log2 - lse.y) : 0.f;
        weights[2 * j + r] = pack_pair<typename C::T>(a, b);
        ds[2 * j + r] = pack_pair<typename C::T>(a * (dp[i] - delta.x), b * (dp[i + 1] - delta.y));
      }
    }
  }

  // The upper of this thread's rows in a block.
  __device__ __forceinline__ int row_in_block() const {
    return 64 * group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }

  // dS to shared memory: a row for each key, tiles of 64 heads.
  __device__ __forceinline__ void store_ds(const Packed& ds) const {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = 64 * group + threadIdx.x % 128 / 32 * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; j += 2) {
      const int chunk = j % 8 + (matrix >> 1);
      store_matrix_x4(
          smem.ds() + (j / 8) * (C::kBlockN * 128) + row * 128 + ((chunk ^ (row & 7)) << 4),
          ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
    }
  }

  // This warp's 16 rows of an accumulator. `row`: of sums or partials, that of row lane % 16; or
  // -1.
  __device__ __forceinline__ void write(const Rows& x, float* sums, float* partials, int width,
                                        int row) const {
    const int upper = thread_again() % 32 / 4;
    const int rows[2] = {__shfl_sync(0xffffffff, row, upper),
                         __shfl_sync(0xffffffff, row, upper + 8)};
    write_shares<C::kD>(x, rows, partials != nullptr ? partials : sums, 0, width,
                        partials == nullptr);
  }

  // One block of keys, `left` and those behind it. `row`: as for `write`.
  __device__ __forceinline__ void block(Rows& dq, int left, int row) {
    Packed weights, ds;
    {
      Scores s, dp;
      mbar_wait(smem.k_full(stage.stage), stage.phase);
      fence_async_proxy();
      __syncwarp();
      start_scores(s, smem.k(stage.stage), smem.q());
      mbar_wait(smem.v_full(stage.stage), stage.phase);
      fence_async_proxy();
      __syncwarp();
      start_scores(dp, smem.v(stage.stage), smem.dout());
      wgmma_wait<0>();
      keep_in_place(s);
      keep_in_place(dp);
      softmax(s, dp, weights, ds, left);
    }
    release(smem.v_empty(stage.stage));
    Rows x;
    start_shares(x, weights, smem.dout());
    meet();  // dq of the block before is done with dS
    store_ds(ds);
    fence_async_proxy();
    meet();
    start_dq(dq);
    wgmma_wait<1>();
    keep_in_place(x);
    write(x, p.dv, p.dv_partials, p.head_dim_v, row);
    start_shares(x, ds, smem.q());
    wgmma_wait<0>();
    keep_in_place(x);
    keep_in_place(dq);
    release(smem.k_empty(stage.stage));
    write(x, p.dk, p.dk_partials, p.head_dim, row);
    stage.advance();
  }

  // dq of the list, by way of the rows of Q, which nobody reads any more after the first barrier.
  __device__ __forceinline__ void write_dq(Rows& dq, const WorkTile& tile) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    const float weight[2] = {p.scale, p.scale};
    named_barrier(kAllConsumers, C::kConsumers);
    if constexpr (kSplitsKeys) {
      // Over Q and dout, thread by thread.
      static_assert(2 * C::kQBytes >= 128 * 4 * C::kD / 2, "room for the dq of a warpgroup");
#pragma unroll
      for (int i = 0; i < C::kD / 2; i += 4) {
        const uint32_t at = smem.q() + (i / 4 * 128 + thread) * 16;
        if (group == 1) sts_float4(at, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
      }
      named_barrier(kAllConsumers, C::kConsumers);
#pragma unroll
      for (int i = 0; i < C::kD / 2; i += 4) {
        if (group == 1) continue;
        const float2 a = lds_float2(smem.q() + (i / 4 * 128 + thread) * 16);
        const float2 b = lds_float2(smem.q() + (i / 4 * 128 + thread) * 16 + 8);
        dq[i] += a.x;
        dq[i + 1] += a.y;
        dq[i + 2] += b.x;
        dq[i + 3] += b.y;
      }
      if (group == 0) {
        named_barrier(kOneWarpgroup, 128);
        stage_rows<typename C::T, C::kD, C::kRows>(smem.q(), dq, weight, warp, lane);
      }
    } else {
      stage_rows<typename C::T, C::kD, C::kRows>(smem.q() + group * 64 * 128, dq, weight, warp,
                                                 lane);
    }
    fence_async_proxy();
    named_barrier(kAllConsumers, C::kConsumers);
    if (group == 0 && thread == 0) {
#pragma unroll
      for (int atom = 0; atom < C::kD / 64; ++atom)
#pragma unroll
        for (int rows = 0; rows < C::kRows / 64; ++rows) {
          const int head = rows * p.work.head_step, token = tile.token + rows * p.work.token_step;
          if (head < p.work.group && token < p.work.total_q)
            store_tile_4d(&p.dq_map, smem.q() + (atom * C::kRows + rows * 64) * 128, atom * 64,
                          head, token, tile.kv_head);
        }
      store_commit();
      store_wait_read();
      mbar_arrive(smem.q_empty());
    }
  }
};

template <typename C>
__device__ void compute_lists(const IndexBwdParams& p, const IndexBwdSmem<C>& smem) {
  IndexBwdWorker<C> worker(p, smem, uniform(threadIdx.x / 128 - 1));
  Ring<1> rows;
  // The row of the block whose key this thread looks up, for its warp.
  const int mine = 64 * worker.group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  for (TileWalk walk(p.num_tiles); !walk.is_over(); walk.advance()) {
    const WorkTile tile = work_tile(p.work, p.tile_begin + walk.number);
    const KeyList list(p.keys, tile.list);
    float dq[C::kD / 2];
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dq[i] = 0.f;
    mbar_wait(smem.q_full(), rows.phase);
    for (int first = 0; first < list.count; first += C::kBlockN) {
      const int key = list.key(first + mine);
      const int row = p.dk_partials != nullptr
                          ? walk.number * static_cast<int>(p.keys.max_keys()) + first + mine
                          : key * p.work.heads_kv + tile.kv_head;
      worker.block(dq, list.count - first, key < 0 ? -1 : row);
    }
    worker.write_dq(dq, tile);
    rows.advance();
  }
  if (threadIdx.x == C::kProducers) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    index_bwd(const __grid_constant__ IndexBwdParams p) {
  const auto smem = make_smem<IndexBwdSmem<C>>(p.q_map, p.dout_map, p.dq_map);
  __syncthreads();
  split_roles<C>([&] { feed<C>(p, smem); }, [&] { compute_lists<C>(p, smem); });
}

}  // namespace magi
