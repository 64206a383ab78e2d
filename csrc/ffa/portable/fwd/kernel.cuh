// SPDX-License-Identifier: Apache-2.0
// FFA forward for any GPU from sm_80 on. A CTA takes a query tile at a time and iterates over all
// key intervals of its segments, accumulating in registers; the output is written once (tiles that
// are split along the keys are combined first, see fwd/combine.cuh). K and V of a block are copied
// while the other one is multiplied.
#pragma once

#include "ffa/common/dropout.cuh"
#include "ffa/common/part.cuh"
#include "ffa/common/work_order.cuh"
#include "ffa/portable/fwd/block_iter.cuh"
#include "ffa/portable/fwd/combine.cuh"
#include "ffa/portable/fwd/epilogue.cuh"

namespace magi::portable {

// scores = Q K^T of a warp's rows and one block. q and k are this lane's addresses.
template <typename C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kAtoms][C::kBlockN / 2], uint32_t q,
                                            uint32_t k) {
  using T = typename C::T;
  clear(s);
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int panel = step / 4, x = step % 4 * 32;
    uint32_t a[C::kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom)
      load_matrix(a[atom], (q ^ x) + panel * C::kBlockM * 128 + atom * 16 * 128);
#pragma unroll
    for (int n = 0; n < C::kBlockN / 16; ++n) {
      uint32_t b[4];
      load_matrix(b, (k ^ x) + panel * C::kBlockN * 128 + n * 16 * 128);
      mma_pair<T>(s, 8 * n, a, b);
    }
  }
}

// out += P V of one block, P packed in registers. v is this lane's address.
template <typename C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kAtoms][C::kDv / 2],
                                            const float (&s)[C::kAtoms][C::kBlockN / 2],
                                            uint32_t v) {
  using T = typename C::T;
#pragma unroll
  for (int step = 0; step < C::kBlockN / 16; ++step) {
    uint32_t a[C::kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[atom][i] = pack_pair<T>(s[atom][8 * step + 2 * i], s[atom][8 * step + 2 * i + 1]);
#pragma unroll
    for (int n = 0; n < C::kDv / 16; ++n) {
      uint32_t b[4];
      load_matrix_transposed(b, (v ^ (n % 4 * 32)) + n / 4 * C::kBlockN * 128 + step * 16 * 128);
      mma_pair<T>(o, 8 * n, a, b);
    }
  }
}

// One block of keys of one head, to shared memory.
template <typename C>
__device__ __forceinline__ void copy_k(const FwdKernelParams& p, uint32_t smem, int kv_head,
                                       int k0) {
  copy_rows<C::kBlockN, C::kD, C::kThreads>(
      smem + C::kKAt, static_cast<const typename C::T*>(p.k) + kv_head * p.k_stride_head,
      p.k_stride_token, p.head_dim, k0, p.total_k);
}

template <typename C>
__device__ __forceinline__ void copy_v(const FwdKernelParams& p, uint32_t smem, int kv_head,
                                       int k0) {
  copy_rows<C::kBlockN, C::kDv, C::kThreads>(
      smem + C::kVAt, static_cast<const typename C::T*>(p.v) + kv_head * p.v_stride_head,
      p.v_stride_token, p.head_dim_v, k0, p.total_k);
}

// Zeroes the V rows that no token of the tile sees in this segment: their weight is zero, but zero
// times the NaN or Inf that such rows may hold is not.
template <typename C>
__device__ void zero_unseen_rows(const FwdKernelParams& p, uint32_t v, uint32_t record, int k0) {
  for (int row = threadIdx.x; row < C::kBlockN; row += C::kThreads) {
    bool seen = false;
#pragma unroll 1
    for (int t = 0; t < p.tile_tokens && !seen; ++t) {
      const int2 keys = lds_int2(record + 4 * kSegmentHeaderWords + 8 * t);
      seen = k0 + row >= keys.x && k0 + row < keys.y;
    }
    if (!seen) zero_row<C::kBlockN, C::kDv>(v, row);
  }
}

// Whether tokens of the row group at row0 see any key of a block, ...
template <typename C>
__device__ __forceinline__ bool is_visited(uint32_t record, int row0, int k0) {
  const int2 visit = lds_int2(record + 32 + 16 * (row0 / (C::kBlockM / C::kGroups)));
  return k0 + C::kBlockN > visit.x && k0 < visit.y;
}

// ... and whether one of them does not see all of its keys.
template <typename C>
__device__ __forceinline__ bool is_masked(uint32_t record, int row0, int k0) {
  const int2 full = lds_int2(record + 40 + 16 * (row0 / (C::kBlockM / C::kGroups)));
  return k0 < full.x || k0 + C::kBlockN > full.y;
}

// P of 16 rows of the work tile in `slot`.
template <typename C>
__device__ __forceinline__ void drop(const FwdKernelParams& p, float (&s)[C::kBlockN / 2], int k0,
                                     int row0, uint32_t slot, int lane) {
  const int4 work = lds_int4(slot);
  uint32_t q_hashes[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const OutRow at = out_row(p, work.x, work.y, row0 + lane / 4 + 8 * r);
    q_hashes[r] = dropout_q_hash(p.dropout, at.token, p.total_q, at.head);
  }
  const auto staying = staying_keys<C::kBlockN>(p.dropout, q_hashes, k0, p.total_k, lane);
#pragma unroll
  for (int i = 0; i < C::kBlockN / 2; ++i) s[i] = staying.has(i) ? s[i] * p.dropout.scale : 0.f;
}

// Scores of a block to P, with the rows of the warp's output rescaled.
template <typename C>
__device__ __forceinline__ void softmax(const FwdKernelParams& p,
                                        float (&s)[C::kAtoms][C::kBlockN / 2],
                                        float (&o)[C::kAtoms][C::kDv / 2],
                                        SoftmaxState<C> (&state)[C::kAtoms], uint32_t record,
                                        int k0, int row0, uint32_t slot, int lane) {
  const bool masked = is_masked<C>(record, row0, k0);
#pragma unroll
  for (int atom = 0; atom < C::kAtoms; ++atom) {
    if (p.has_softcap) cap_scores<C>(s[atom], p.scale);
    if (masked) {
      const uint32_t intervals = record + 4 * kSegmentHeaderWords;
      const int row = row0 + 16 * atom + lane / 4;
      const int2 keys[2] = {lds_int2(intervals + 8 * (row >> p.pack_log2)),
                            lds_int2(intervals + 8 * ((row + 8) >> p.pack_log2))};
      mask_scores<C::kBlockN>(s[atom], k0, keys, lane);
    }
    if (state[atom].refer(s[atom], p.scale_log2, p.unscale, p.slack)) state[atom].rescale(o[atom]);
    state[atom].exponentiate(s[atom], p.scale_log2);
    if constexpr (C::kDropout) drop<C>(p, s[atom], k0, row0 + 16 * atom, slot, lane);
  }
}

// One thread: takes work tiles from a counter, beginning with `work`, until one has a part to work
// on, and leaves it in shared memory: tile (-1: no more work), head unit, Part::word, number of the
// whole tile, kv head.
__device__ __forceinline__ void publish_work(const FwdKernelParams& p, const PlanReader& plan,
                                             uint32_t slot, int work) {
  const magi_tile_plan_header& header = plan.header();
  const int total = p.num_tiles * p.head_units * p.max_parts;
  while (work < total) {
    const int whole = work / p.max_parts;
    int order_idx, head_unit;
    work_tile_coords(p, whole, &order_idx, &head_unit);
    const int tile = tile_of(p, header.words_order, header.words_first_order, whole, order_idx);
    Part part{work % p.max_parts, 1};
    if (p.max_parts > 1)
      part.count = min(p.max_parts, max(1, plan.tile(tile).num_blocks / kBlocksOfPart));
    if (part.index < part.count) {
      sts_int4(slot, tile, head_unit, part.word(), whole);
      sts_int(slot + 16, head_unit / p.kv_head_of_head_unit);
      return;
    }
    work = atomicAdd(p.workspace, 1) + gridDim.x;
  }
  sts_int4(slot, -1, 0, 0, 0);
}

// The work tile, or part of one, that is in `slot`; meanwhile the next one is put into `next_slot`.
template <typename C>
__device__ __forceinline__ void attend(const FwdKernelParams& p, const PlanReader& plan,
                                       uint32_t smem, uint32_t slot, uint32_t next_slot) {
  using T = typename C::T;
  const int row0 = uniform(threadIdx.x / 32) * C::kRowsPerWarp;
  const int4 work = lds_int4(slot);
  const bool leads = threadIdx.x < 32;  // the warp that goes ahead
  if (leads) start_blocks<C>(p, smem, slot, threadIdx.x);
  __syncthreads();
  KeyBlock block = block_at_hand<C>(p, smem);
  if (block.exists) {
    copy_tile<C::kBlockM, C::kD, C::kThreads>(
        smem + C::kQAt, static_cast<const T*>(p.q), p.head_dim, [&](int row) -> int64_t {
          const OutRow at = out_row(p, work.x, work.y, row);
          return at.exists ? at.token * p.q_stride_token + at.head * p.q_stride_head : kNoRow;
        });
    copy_k<C>(p, smem, lds_int(slot + 16), block.k1 - C::kBlockN);
    copy_commit();
  }
  if (threadIdx.x == 0)
    publish_work(p, plan, next_slot, atomicAdd(p.workspace, 1) + static_cast<int>(gridDim.x));

  float o[C::kAtoms][C::kDv / 2];
  SoftmaxState<C> state[C::kAtoms];
  clear(o);
#pragma unroll
  for (int atom = 0; atom < C::kAtoms; ++atom) state[atom].reset();

  while (block.exists) {
    const int k0 = block.k1 - C::kBlockN;
    const uint32_t record = block.record;
    copy_wait<0>();
    __syncthreads();  // K has arrived; V and the other record are free
    copy_v<C>(p, smem, lds_int(slot + 16), k0);
    copy_commit();
    if (leads) advance_block<C>(p, smem, slot, threadIdx.x);
    const bool works = is_visited<C>(record, row0, k0);
    float s[C::kAtoms][C::kBlockN / 2];
    // The addresses of lanes are worked out anew for each block rather than kept in registers.
    if (works)
      multiply_qk<C>(s, straight_lane<128>(smem + C::kQAt + row0 * 128, thread_again() % 32),
                     crossed_lane<128>(smem + C::kKAt, thread_again() % 32));
    copy_wait<0>();
    __syncthreads();  // V has arrived; K is free; the next block is known
    block = block_at_hand<C>(p, smem);
    if (block.exists) {
      copy_k<C>(p, smem, lds_int(slot + 16), block.k1 - C::kBlockN);
      copy_commit();
    }
    if (lds_int(record + 16) != 0) {  // has_unseen
      zero_unseen_rows<C>(p, smem + C::kVAt, record, k0);
      __syncthreads();
    }
    if (works) {
      softmax<C>(p, s, o, state, record, k0, row0, slot, thread_again() % 32);
      multiply_pv<C>(o, s, straight_lane<128>(smem + C::kVAt, thread_again() % 32));
    }
  }
  // Tile and head are read again rather than kept in registers.
  const int4 again = lds_int4(slot);
  const Part part = Part::of_word(again.z);
  if (part.count > 1 && !combine_splits<C>(p, o, state, again.w, part, slot)) return;
  write_tile<C>(p, smem + C::kQAt, o, state, again.x, again.y);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    ffa_fwd(const __grid_constant__ FwdKernelParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  const PlanReader plan{p.plan};
  if (!plan.fits(p.total_q, p.total_k, p.tile_tokens, C::kGroups)) {
    write_nan<C>(p);
    return;
  }
  const uint32_t smem = shared_address(raw);
  uint32_t slot = smem + C::kWorkAt;
  if (threadIdx.x == 0) publish_work(p, plan, slot, blockIdx.x);
  __syncthreads();
  while (lds_int(slot) >= 0) {
    const uint32_t next_slot = slot ^ 32;
    attend<C>(p, plan, smem, slot, next_slot);
    __syncthreads();
    slot = next_slot;
  }
  // The last CTA to get here resets the counter for the next launch on this stream.
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicInc(reinterpret_cast<unsigned*>(p.workspace) + 1, gridDim.x - 1) == gridDim.x - 1)
      p.workspace[0] = 0;
  }
}

}  // namespace magi::portable
