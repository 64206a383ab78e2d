// SPDX-License-Identifier: Apache-2.0
// The kernels before and after the main one of the backward, over the rows of queries: the first computes
// delta = sum(out * dout) and the offsets of the exponents and clears the sum of dq, or where dq is summed in order assigns the turns; the
// last rounds that sum to dq. And the one that adds up dk and dv of tiles whose heads are shared out.
#pragma once

#include "../common/copy.cuh"
#include "../common/scores.cuh"
#include "../common/barrier.cuh"
#include "bwd_config.h"
#include "bwd_params.h"
#include "bwd_split.cuh"
#include "bwd_turns.cuh"
#include "schedule.cuh"

namespace magi {

// This lane's share of sum(out * dout) of one row; eight lanes have a row, each takes every eighth 16 bytes.
template <typename T>
__device__ __forceinline__ float row_delta(const BwdRowParams& p, int token, int head, int lane) {
  const uint4* out = reinterpret_cast<const uint4*>(static_cast<const T*>(p.out) + token * p.out_stride_token +
                                                    head * p.out_stride_head);
  const uint4* dout = reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout) + token * p.dout_stride_token +
                                                     head * p.dout_stride_head);
  float sum = 0.f;
  for (int i = lane; i < p.head_dim_v / 8; i += 8) {
    const uint4 a = __ldg(out + i), b = __ldg(dout + i);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = unpack_pair<T>(x[j]), v = unpack_pair<T>(y[j]);
      // A row that sees nothing has an out of zero, and its dout may be anything.
      sum += (u.x != 0.f ? u.x * v.x : 0.f) + (u.y != 0.f ? u.y * v.y : 0.f);
    }
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  return sum;
}

// One CTA per head and block of queries.
template <typename T, int kQueries>
__global__ void __launch_bounds__(kRowThreads, 6) bwd_prepare(const BwdRowParams p) {
  const int block = blockIdx.x, head = blockIdx.y;
  const int64_t number = static_cast<int64_t>(head) * p.query_blocks + block;
  start_next_kernel();
  if (number == 0)
    for (int i = threadIdx.x; i < kBwdCounters; i += kRowThreads) p.workspace[i] = 0;
  if (p.units != nullptr && number == 0 && bwd_plan_fits(p.plan, p.total_q, p.total_k)) {
    __syncthreads();
    choose_units(p);
  }
  if (p.turn_flags != nullptr) {
    if (threadIdx.x < p.passes) p.turn_flags[number * p.passes + threadIdx.x] = 0;
    if (head == 0 && bwd_plan_fits(p.plan, p.total_q, p.total_k)) {
      wait_for_kernel_before();
      assign_turns<kRowThreads>(p, block);
    }
  }
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + number * p.dim_blocks * dq_block_floats(kQueries));
  if (p.turn_flags == nullptr)
    for (int i = threadIdx.x; i < p.dim_blocks * dq_block_floats(kQueries) / 4; i += kRowThreads) sum[i] = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int row = threadIdx.x / 8; row < kQueries; row += kRowThreads / 8) {
    const int token = block * kQueries + row, lane = threadIdx.x % 8;
    const int64_t at = static_cast<int64_t>(token) * p.heads_q + head;
    const bool exists = token < p.total_q;
    float delta = 0.f, offset = INFINITY;
    if (p.out != nullptr) {
      const float own = row_delta<T>(p, exists ? token : 0, head, lane);
      if (exists) delta = own;
    } else if (exists) {
      delta = p.delta[at];
    }
    if (exists) {
      const float lse = p.lse[at];
      if (lse == -INFINITY)
        delta = 0.f;  // the row sees nothing and may hold anything
      else
        offset = lse * kLog2e;
    }
    if (lane != 0) continue;
    p.stats[number * stat_floats(kQueries) + row] = offset;
    p.stats[number * stat_floats(kQueries) + kQueries + row] = delta;
    if (exists && p.out != nullptr && p.delta != nullptr) p.delta[at] = delta;
  }
}

// What a thread of a warpgroup holds of a block of dq: chunks of four values, two pairs each, as the accumulator of the main kernel has
// them. Its rows are queries, or columns in wide blocks.
template <int kQueries>
struct DqChunk {
  static constexpr bool kWide = kQueries != kQueryBlock;
  static constexpr int kCount = kQueries / 8;
  // Place of the first value of pair r of chunk i.
  static __device__ __forceinline__ int2 query_and_column(int thread, int i, int r) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * r, column = 8 * i + thread % 4 * 2;
    return kWide ? make_int2(column, row) : make_int2(row, column);
  }
};

// Rounded, to rows of 128 bytes in shared memory.
template <typename T, int kQueries>
__device__ __forceinline__ void stage_dq(uint32_t tile, const float4 (&x)[DqChunk<kQueries>::kCount], float factor, int thread) {
  const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < DqChunk<kQueries>::kCount; i += 2) {
    // Lane 8m + l addresses row l of matrix m: (accumulator's rows 0-7, rows 8-15) x (columns 0-7, columns 8-15).
    const int across = (matrix & 1) * 8, along = i + (matrix >> 1);
    const int query = DqChunk<kQueries>::kWide ? 8 * along + lane % 8 : warp * 16 + across + lane % 8;
    const int chunk = DqChunk<kQueries>::kWide ? 2 * warp + across / 8 : along;
    const uint32_t at = tile + query * 128 + ((chunk ^ (query & 7)) << 4);
    const uint32_t values[4] = {pack_pair<T>(x[i].x * factor, x[i].y * factor), pack_pair<T>(x[i].z * factor, x[i].w * factor),
                                pack_pair<T>(x[i + 1].x * factor, x[i + 1].y * factor),
                                pack_pair<T>(x[i + 1].z * factor, x[i + 1].w * factor)};
    if constexpr (DqChunk<kQueries>::kWide)
      store_matrix_transposed_x4(at, values[0], values[1], values[2], values[3]);
    else
      store_matrix_x4(at, values[0], values[1], values[2], values[3]);
  }
}

template <int kQueries>
__device__ __forceinline__ void write_float_dq(const BwdRowParams& p, const float4 (&x)[DqChunk<kQueries>::kCount], float factor,
                                               int first_query, int head, int first_column, int thread) {
  const int64_t row_values = static_cast<int64_t>(p.heads_q) * p.head_dim;
#pragma unroll
  for (int i = 0; i < DqChunk<kQueries>::kCount; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 place = DqChunk<kQueries>::query_and_column(thread, i, r);
      const int token = first_query + place.x, column = first_column + place.y;
      if (token >= p.total_q || column >= p.head_dim) continue;
      float* to = static_cast<float*>(p.dq) + token * row_values + head * p.head_dim + column;
      float2 value = r ? make_float2(x[i].z * factor, x[i].w * factor) : make_float2(x[i].x * factor, x[i].y * factor);
      if constexpr (DqChunk<kQueries>::kWide) {
        *to = p.accumulate ? *to + value.x : value.x;
        if (token + 1 < p.total_q) to[row_values] = p.accumulate ? to[row_values] + value.y : value.y;
      } else {
        float2* pair = reinterpret_cast<float2*>(to);
        *pair = p.accumulate ? make_float2(pair->x + value.x, pair->y + value.y) : value;
      }
    }
  }
}

// One CTA per head and block of queries; warpgroup i takes blocks of 64 columns i, i + 2, ...
template <typename T, int kQueries>
__global__ void __launch_bounds__(kRowThreads, 3) bwd_finish(const BwdRowParams p) {
  __shared__ __align__(128) uint8_t staged[2][kQueries * 128];
  const int block = blockIdx.x, head = blockIdx.y, group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int64_t number = static_cast<int64_t>(head) * p.query_blocks + block;
  wait_for_kernel_before();
  const float factor = bwd_plan_fits(p.plan, p.total_q, p.total_k) ? p.grad_scale : __int_as_float(0x7fffffff);
  for (int d = group; d < p.dim_blocks; d += 2) {
    const float4* sum = reinterpret_cast<const float4*>(p.dq_sum + (number * p.dim_blocks + d) * dq_block_floats(kQueries)) + thread;
    // In order the first to add stores, so where nobody did there is nothing. Counters and sums are read in L2: this CTA may have
    // been there since before they were written, with lines in its first cache that CTAs of the kernels before have left.
    const bool is_there = p.turn_flags == nullptr || load_relaxed(p.turn_flags + number * p.passes + d / (p.dim_blocks / p.passes)) > 0;
    float4 x[DqChunk<kQueries>::kCount];
#pragma unroll
    for (int i = 0; i < DqChunk<kQueries>::kCount; ++i) x[i] = is_there ? __ldcg(sum + 128 * i) : make_float4(0, 0, 0, 0);
    if (p.grads_are_float) {
      write_float_dq<kQueries>(p, x, factor, block * kQueries, head, d * 64, thread);
      continue;
    }
    stage_dq<T, kQueries>(smem_addr(staged[group]), x, factor, thread);
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = thread; i < kQueries * 8; i += 128) {
      const int token = block * kQueries + i / 8, column = d * 64 + i % 8 * 8;
      if (token >= p.total_q || column >= p.head_dim) continue;
      const uint4 value = *reinterpret_cast<const uint4*>(staged[group] + i / 8 * 128 + ((i % 8 ^ (i / 8 & 7)) << 4));
      *reinterpret_cast<uint4*>(static_cast<T*>(p.dq) + (static_cast<int64_t>(token) * p.heads_q + head) * p.head_dim +
                                column) = value;
    }
    named_barrier(1 + group, 128);
  }
}

// Four values of a gradient at `to_at` from their parts at `at`, in the order of the parts, which are `count` values apart.
template <typename T>
__device__ __forceinline__ void join_four(const float* values, int parts, int64_t at, int64_t count, void* grad, int64_t to_at,
                                          bool is_float, bool adds) {
  float4 sum = *reinterpret_cast<const float4*>(values + at);
  for (int i = 1; i < parts; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(values + i * count + at);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  if (!is_float) {
    *reinterpret_cast<uint2*>(static_cast<T*>(grad) + to_at) = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
    return;
  }
  float4* to = reinterpret_cast<float4*>(static_cast<float*>(grad) + to_at);
  if (adds) sum = make_float4(sum.x + to->x, sum.y + to->y, sum.z + to->z, sum.w + to->w);
  *to = sum;
}

// Where query heads of all tiles are shared out among units, which leave a dk and dv for each part.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) bwd_join(const BwdJoinParams p) {
  wait_for_kernel_before();
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x);
  if (at < p.dk_count) join_four<T>(p.dk_parts, p.parts, at, p.dk_count, p.dk, at, p.grads_are_float, p.accumulate);
  if (at < p.dv_count) join_four<T>(p.dv_parts, p.parts, at, p.dv_count, p.dv, at, p.grads_are_float, p.accumulate);
}

// Tile and kv head of the unit whose parts are in a slot.
__device__ __forceinline__ int2 unit_of_slot(const BwdSplitJoinParams& p, int slot) {
  const int unit = p.first + slot;
  if (p.units != nullptr) return make_int2(p.units[unit].x, p.units[unit].y);  // the first parts are listed by slot
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  int rank, head;
  unit_coords(p, unit, &rank, &head);
  return make_int2(tile_of(p, plan.words_order, plan.words_first_order, unit, rank), head);
}

// The gradient of split units. Their parts have room for whole tiles; those of remote keys go to their owners.
template <typename T>
__device__ __forceinline__ void join_slots(const float* values, void* grad, const int64_t* targets, int64_t count, int head_dim,
                                           const BwdSplitJoinParams& p) {
  const int64_t step = 4ll * gridDim.x * kRowThreads;
  for (int64_t at = 4ll * (blockIdx.x * kRowThreads + threadIdx.x); at < count; at += step) {
    const uint32_t row = static_cast<uint32_t>(at) / head_dim, column = static_cast<uint32_t>(at) % head_dim;  // of few slots
    const int2 unit = unit_of_slot(p, row / kTileKeys);
    const int key = unit.x * kTileKeys + row % kTileKeys;
    auto place = [&](int64_t of_row) { return (of_row * p.heads_kv + unit.y) * head_dim + column; };
    if (key >= p.remote.base) {
      const int remote = unit.x - p.remote.base / kRemoteTile;
      join_four<T>(values, p.join.parts, at, count, reinterpret_cast<void*>(targets[p.remote.owners[remote]]),
                   place(p.remote.target_rows[remote] + row % kTileKeys), p.remote.wire_is_float, false);
    } else if (key < p.remote.local_keys) {
      join_four<T>(values, p.join.parts, at, count, grad, place(key), p.join.grads_are_float, p.join.accumulate);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 4) bwd_join_split(const __grid_constant__ BwdSplitJoinParams p) {
  wait_for_kernel_before();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  if (p.units != nullptr && p.workspace[kSplitWord] == 0) return;
  join_slots<T>(p.join.dk_parts, p.join.dk, p.remote.dk_targets, p.join.dk_count, p.head_dim, p);
  join_slots<T>(p.join.dv_parts, p.join.dv, p.remote.dv_targets, p.join.dv_count, p.head_dim_v, p);
}

}  // namespace magi
