// SPDX-License-Identifier: Apache-2.0
// Rows of keys and queries that take part in nothing are cleared in shared memory, by a warp of the feeding side. It hands out units, too,
// where the lane that does so elsewhere adds dq (C::kOrdered).
#pragma once

#include "../common/copy.cuh"
#include "bwd_complete.cuh"
#include "bwd_feed.cuh"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"
#include "bwd_split.cuh"
#include "bwd_units.cuh"
#include "schedule.cuh"

namespace magi {

// Zeroes a row of a tile of `rows` rows.
template <typename C>
__device__ __forceinline__ void clear_row(uint32_t tile, int rows, int row) {
#pragma unroll 1
  for (int chunk = 0; chunk < C::kD / 8; ++chunk)
    asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(tile + chunk / 8 * rows * 128 + row * 128 + chunk % 8 * 16),
                 "r"(0)
                 : "memory");
}

// Whether any key of a tile sees the query in this layer. One that is in the full range of a warpgroup is found at once.
template <typename C>
__device__ __forceinline__ bool is_seen(uint32_t layer, int query) {
  for (int group = 0; group < C::kGroups; ++group) {
    const int2 full = lds_int2(layer + 32 + 16 * group + 8);
    if (query >= full.x && query < full.y) return true;
  }
#pragma unroll 1
  for (int key = 0; key < C::kKeys; ++key) {
    const int2 queries = lds_int2(layer + C::kLayerHeader + 8 * key);
    if (query >= queries.x && query < queries.y) return true;
  }
  return false;
}

// Bit j: whether row lane + 32 j of a tile has an interval in any of its layers.
template <typename C>
__device__ __forceinline__ uint32_t seen_rows(const int32_t* plan, int tile, int layers, int lane) {
  const magi_tile_plan_header& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  const int first = layers_of_tile(plan, tile).x;
  const int32_t* record = plan + header.words_records + first * header.layer_words + C::kLayerHeader / 4 + 2 * lane;
  uint32_t seen = 0;
#pragma unroll 1
  for (; layers > 0 && seen != (1u << C::kKeys / 32) - 1; --layers, record += C::kLayerBytes / 4) {
#pragma unroll 1
    for (int j = 0; j < C::kKeys / 32; ++j) {
      const int2 row = *reinterpret_cast<const int2*>(record + 64 * j);
      seen |= (row.x < row.y ? 1u : 0u) << j;
    }
  }
  return seen;
}

// One warp. Keys that no query sees and queries that see nothing may hold NaN or Inf, and zero times those is not zero: it
// clears the rows of such keys in every unit and, where the mask has such queries, all that no key of the tile sees. Not by
// lse: with sinks a query that sees nothing has one. It also tells when a listed unit is through, as the warp with the least to do.
template <typename C>
__device__ void clear_unseen(const BwdKernelParams& p, const BwdSmem<C>& smem, int lane) {
  Turns turns;
  Steps<C> steps;
  if (lane == 0) sts_int(smem.through(), -1);
  auto tell_before = [&] {
    if (!C::kListed || p.units == nullptr || lds_int(smem.through()) < 0) return;
    mbar_wait(smem.unit_empty(turns.unit_slot() ^ 1), turns.unit_phase() ^ turns.unit_slot() ^ 1);
    if (lane == 0) tell_complete(p, smem.through());
  };
  while (true) {
    if constexpr (C::kOrdered) {
      if (lane == 0) publish_in_turns(p, smem, turns);
      __syncwarp();
    }
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    const uint32_t seen = seen_rows<C>(p.plan, unit.x, unit.z, lane);
    mbar_wait(smem.kv_raw(), turns.kv_phase());
    if (unit.z > 0) {
#pragma unroll 1
      for (int j = 0; j < C::kKeys / 32; ++j) {
        if (seen >> j & 1) continue;
        clear_row<C>(smem.k(), C::kKeys, lane + 32 * j);
        clear_row<C>(smem.v(), C::kKeys, lane + 32 * j);
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.kv_full());
    tell_before();
    if (lane == 0) sts_int(smem.through(), parts_of_unit(p, unit.x, unit.y, unit.w));
    const bool clears = has_unseen(p);
#pragma unroll 1
    for (int left = unit.z; left > 0; --left) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      const int2 range = blocks_of_unit<C>(smem.layer(turns.layer_slot()), unit.w);
      const int blocks = range.y - range.x;
#pragma unroll 1
      for (int i = clears ? heads_of_unit<C>(p, unit.w) * blocks : 0; i > 0; --i) {
        const Ring<C::kStages> ring = steps.now();
        mbar_wait(smem.q_raw(ring.slot), ring.phase);  // and what the step is was said before that was asked for
#pragma unroll 1
        for (int row = lane; row < C::kQueries; row += 32) {
          const int query = lds_int(smem.step(ring.slot) + 4) + row;
          if (is_seen<C>(smem.layer(turns.layer_slot()), query)) continue;
          clear_row<C>(smem.q(ring.slot), C::kQueries, row);
          clear_row<C>(smem.dout(ring.slot), C::kQueries, row);
          sts_int(smem.stats(ring.slot) + 4 * row, __float_as_int(INFINITY));
          sts_int(smem.stats(ring.slot) + 4 * (C::kQueries + row), 0);
        }
        fence_async_proxy();
        mbar_arrive(smem.q_full(ring.slot));
        mbar_arrive(smem.do_full(ring.slot));
        steps.advance();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
      if constexpr (C::kOrdered) {
        // Two further on: into the place of this one, when all have left it.
        if (lane == 0 && left > 2) {
          Turns staged = turns;
          staged.next_layer();
          const int4 again = lds_int4(smem.unit(turns.unit_slot()));  // rather than kept
          stage_layer(p, smem, staged, again.x, again.z - left + 2);
        }
        __syncwarp();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
    if constexpr (C::kOrdered)
      if (lane == 0) mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // a phase for each unit, and this one has been counted
  }
  tell_before();
  if constexpr (C::kOrdered)
    if (lane == 0) leave_units(p);
}

}  // namespace magi
