// SPDX-License-Identifier: Apache-2.0
// Adds up dk and dv of units that were split (bwd_split.cuh), from the parts that they left.
#pragma once

#include "bwd_join.cuh"
#include "bwd_plan.cuh"
#include "bwd_split.cuh"
#include "schedule.cuh"

namespace magi {

// Tile, kv head and number of parts of the unit in a slot, where units are listed: told behind the list.
__device__ __forceinline__ int4 listed_slot(const BwdSplitJoinParams& p, int slot) { return __ldcg(p.units + __ldcg(p.workspace + kUnitsWord) + slot); }

// Share i of n of the rows of such a slot, by a CTA. Parts have room for whole tiles, and are `count` values apart.
template <typename T>
__device__ __forceinline__ void join_rows(const float* values, void* grad, int64_t count, int head_dim, const BwdSplitJoinParams& p, int slot,
                                          int share, int shares) {
  const int4 unit = listed_slot(p, slot);
  const uint32_t per_slot = kTileKeys * head_dim, quads = per_slot / 4;
  for (uint32_t i = quads * share / shares + threadIdx.x; i < quads * (share + 1) / shares; i += kRowThreads) {
    const uint32_t row = 4 * i / head_dim, column = 4 * i % head_dim;
    const int64_t key = unit.x * kTileKeys + row;
    if (key < p.remote.local_keys)
      join_four<T>(values, unit.z, slot * per_slot + 4 * i, count, grad, (key * p.heads_kv + unit.y) * head_dim + column,
                   p.join.grads_are_float, p.join.accumulate);
  }
}

// Tile and kv head of the unit in a slot, where they are not listed.
__device__ __forceinline__ int2 unit_of_slot(const BwdSplitJoinParams& p, int slot) {
  const int unit = p.first + slot;
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  if (plan.words_units != 0 && !p.in_turns) {
    const magi_walked_unit told = reinterpret_cast<const magi_walked_unit*>(p.plan + plan.words_units)[unit];
    return make_int2(told.tile, told.head_and_walk >> MAGI_WALK_BITS);
  }
  int rank, head;
  unit_coords(p, unit, &rank, &head);
  return make_int2(tile_of(p, plan.words_order, plan.words_first_order, unit, rank), head);
}

// The gradient of all such slots, by all CTAs; that of remote keys goes to their owners, of local ones to which others add to the sums.
template <typename T>
__device__ __forceinline__ void join_slots(const float* values, void* grad, float* sums, const int64_t* targets, int64_t count, int head_dim,
                                           const BwdSplitJoinParams& p) {
  const uint32_t step = 4 * gridDim.x * kRowThreads;  // slots are few, so 32 bits do
  for (uint32_t at = 4 * (blockIdx.x * kRowThreads + threadIdx.x); at < static_cast<uint32_t>(count); at += step) {
    const uint32_t row = at / head_dim, column = at % head_dim;
    const int2 unit = unit_of_slot(p, row / kTileKeys);
    const int key = unit.x * kTileKeys + row % kTileKeys;
    auto place = [&](int64_t of_row) { return (of_row * p.heads_kv + unit.y) * head_dim + column; };
    if (key >= p.remote.base) {
      const int remote = unit.x - p.remote.base / kRemoteTile;
      join_four<T>(values, p.join.parts, at, count, reinterpret_cast<void*>(targets[p.remote.owners[remote]]),
                   place(p.remote.target_rows[remote] + row % kTileKeys), p.remote.wire_is_float, false);
    } else if (const int summed = summed_tile(p.remote, unit.x); summed >= 0) {
      join_four<T>(values, p.join.parts, at, count, sums, place(static_cast<int64_t>(summed) * kTileKeys + row % kTileKeys), true, false);
    } else if (key < p.remote.local_keys) {
      join_four<T>(values, p.join.parts, at, count, grad, place(key), p.join.grads_are_float, p.join.accumulate);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 4) bwd_join_split(const __grid_constant__ BwdSplitJoinParams p) {
  wait_for_kernel_before();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  join_slots<T>(p.join.dk_parts, p.join.dk, p.remote.dk_sums, p.remote.dk_targets, p.join.dk_count, p.head_dim, p);
  join_slots<T>(p.join.dv_parts, p.join.dv, p.remote.dv_sums, p.remote.dv_targets, p.join.dv_count, p.head_dim_v, p);
}

}  // namespace magi
