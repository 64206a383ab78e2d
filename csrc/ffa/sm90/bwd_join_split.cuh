// SPDX-License-Identifier: Apache-2.0
// Adds up dk and dv of units that were split (bwd_split.cuh), from the parts that they left.
#pragma once

#include "bwd_join.cuh"
#include "bwd_plan.cuh"
#include "bwd_split.cuh"
#include "schedule.cuh"

namespace magi {

// Tile and kv head of the unit whose parts are in a slot, and how many those are.
__device__ __forceinline__ int3 unit_of_slot(const BwdSplitJoinParams& p, int slot) {
  if (p.units != nullptr) {  // told behind the list
    const int4 row = p.units[p.workspace[kUnitsWord] + slot];
    return make_int3(row.x, row.y, row.z);
  }
  const int unit = p.first + slot;
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  int rank, head;
  unit_coords(p, unit, &rank, &head);
  return make_int3(tile_of(p, plan.words_order, plan.words_first_order, unit, rank), head, p.join.parts);
}

// The gradient of split units. Their parts have room for whole tiles, and are `count` values apart; those of remote keys go to
// their owners.
template <typename T>
__device__ __forceinline__ void join_slots(const float* values, void* grad, const int64_t* targets, int64_t count, int head_dim,
                                           const BwdSplitJoinParams& p) {
  const uint32_t step = 4 * gridDim.x * kRowThreads;  // slots are few, so 32 bits do
  const uint32_t end = p.units != nullptr ? p.workspace[kSplitWord] * kTileKeys * head_dim : static_cast<uint32_t>(count);
  for (uint32_t at = 4 * (blockIdx.x * kRowThreads + threadIdx.x); at < end; at += step) {
    const uint32_t row = at / head_dim, column = at % head_dim;
    const int3 unit = unit_of_slot(p, row / kTileKeys);
    const int key = unit.x * kTileKeys + row % kTileKeys;
    auto place = [&](int64_t of_row) { return (of_row * p.heads_kv + unit.y) * head_dim + column; };
    if (key >= p.remote.base) {
      const int remote = unit.x - p.remote.base / kRemoteTile;
      join_four<T>(values, unit.z, at, count, reinterpret_cast<void*>(targets[p.remote.owners[remote]]),
                   place(p.remote.target_rows[remote] + row % kTileKeys), p.remote.wire_is_float, false);
    } else if (key < p.remote.local_keys) {
      join_four<T>(values, unit.z, at, count, grad, place(key), p.join.grads_are_float, p.join.accumulate);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 4) bwd_join_split(const __grid_constant__ BwdSplitJoinParams p) {
  wait_for_kernel_before();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  join_slots<T>(p.join.dk_parts, p.join.dk, p.remote.dk_targets, p.join.dk_count, p.head_dim, p);
  join_slots<T>(p.join.dv_parts, p.join.dv, p.remote.dv_targets, p.join.dv_count, p.head_dim_v, p);
}

}  // namespace magi
