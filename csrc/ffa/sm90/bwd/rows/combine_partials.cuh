// SPDX-License-Identifier: Apache-2.0
// Adds up dk and dv of work tiles that were split (bwd/schedule/split.cuh), from the partials of
// their parts.
#pragma once

#include "ffa/common/combine_heads.cuh"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/bwd/schedule/work_list.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

// Tile, kv head and number of parts of a partial's work tile, with a work list.
__device__ __forceinline__ int4 listed_partial(const BwdCombinePartialsParams& p, int partial) {
  const int at = work_list_header(p.work_list).words_partials;
  return __ldg(reinterpret_cast<const int4*>(p.work_list + at) + partial);
}

// One of `num_row_ranges` ranges of the rows of such a partial, by a CTA. Parts have room for whole
// tiles, and are `count` values apart.
template <typename T>
__device__ __forceinline__ void combine_rows(const float* values, void* grad, int64_t count,
                                             int head_dim, const BwdCombinePartialsParams& p,
                                             int partial, int row_range, int num_row_ranges) {
  const int4 work_tile = listed_partial(p, partial);
  const uint32_t per_partial = kTileBlockN * head_dim, quads = per_partial / 4;
  for (uint32_t i = quads * row_range / num_row_ranges + threadIdx.x;
       i < quads * (row_range + 1) / num_row_ranges; i += kRowThreads) {
    const uint32_t row = 4 * i / head_dim, column = 4 * i % head_dim;
    const int64_t key = work_tile.x * kTileBlockN + row;
    if (key < p.remote.local_keys)
      combine_four<T>(values, work_tile.z, partial * per_partial + 4 * i, count, grad,
                      (key * p.heads_kv + work_tile.y) * head_dim + column,
                      p.combine.grads_are_float, p.combine.accumulate);
  }
}

// Tile and kv head of a partial's work tile, without a work list.
__device__ __forceinline__ int2 work_tile_of_partial(const BwdCombinePartialsParams& p,
                                                     int partial) {
  const int work_tile = p.first + partial;
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  if (plan.words_work_tiles != 0 && !p.is_deterministic) {
    const magi_work_tile& row =
        reinterpret_cast<const magi_work_tile*>(p.plan + plan.words_work_tiles)[work_tile];
    return make_int2(row.tile, row.head_kv);
  }
  int order_idx, head;
  work_tile_coords(p, work_tile, &order_idx, &head);
  return make_int2(tile_of(p, plan.words_order, plan.words_first_order, work_tile, order_idx),
                   head);
}

// The gradient of all such partials, by all CTAs. Gradients of remote keys go to their owners, and
// those of local keys to which other ranks add go to the sums.
template <typename T>
__device__ __forceinline__ void combine_partials(const float* values, void* grad, float* sums,
                                                 const int64_t* targets, int64_t count,
                                                 int head_dim, const BwdCombinePartialsParams& p) {
  const uint32_t step = 4 * gridDim.x * kRowThreads;  // partials are few, so 32 bits do
  for (uint32_t at = 4 * (blockIdx.x * kRowThreads + threadIdx.x);
       at < static_cast<uint32_t>(count); at += step) {
    const uint32_t row = at / head_dim, column = at % head_dim;
    const int2 work_tile = work_tile_of_partial(p, row / kTileBlockN);
    const int key = work_tile.x * kTileBlockN + row % kTileBlockN;
    auto place = [&](int64_t of_row) {
      return (of_row * p.heads_kv + work_tile.y) * head_dim + column;
    };
    if (key >= p.remote.base) {
      const int remote = work_tile.x - p.remote.base / kRemoteTile;
      combine_four<T>(values, p.combine.parts, at, count,
                      reinterpret_cast<void*>(targets[p.remote.owners[remote]]),
                      place(p.remote.target_rows[remote] + row % kTileBlockN),
                      p.remote.wire_is_float, false);
    } else if (const int summed = summed_tile(p.remote, work_tile.x); summed >= 0) {
      combine_four<T>(values, p.combine.parts, at, count, sums,
                      place(static_cast<int64_t>(summed) * kTileBlockN + row % kTileBlockN), true,
                      false);
    } else if (key < p.remote.local_keys) {
      combine_four<T>(values, p.combine.parts, at, count, grad, place(key),
                      p.combine.grads_are_float, p.combine.accumulate);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 4)
    bwd_combine_partials(const __grid_constant__ BwdCombinePartialsParams p) {
  wait_for_kernel_before();
  // Without a schedule of the host tiles stay whole, except in order.
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k) ||
      !(p.is_deterministic || has_work_tiles(p.plan)))
    return;
  combine_partials<T>(p.combine.dk_parts, p.combine.dk, p.remote.dk_sums, p.remote.dk_targets,
                      p.combine.dk_count, p.head_dim, p);
  combine_partials<T>(p.combine.dv_parts, p.combine.dv, p.remote.dv_sums, p.remote.dv_targets,
                      p.combine.dv_count, p.head_dim_v, p);
}

}  // namespace magi
