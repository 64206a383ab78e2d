// SPDX-License-Identifier: Apache-2.0
// The feeding side of the backward kernel: its shared memory, and the three parts of warpgroup 0, which hand out units,
// copy tiles, and clear rows of keys and queries that take part in nothing.
#pragma once

#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/copy.cuh"
#include "../common/shared.cuh"
#include "bwd_config.h"
#include "bwd_params.h"
#include "schedule.cuh"

namespace magi {

template <typename C>
struct BwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ explicit BwdSmem(uint32_t start) : base(start) {}
  __device__ uint32_t k() const { return base + C::kKAt; }
  __device__ uint32_t v() const { return base + C::kVAt; }
  __device__ uint32_t q(uint32_t slot) const { return base + C::kQAt + slot * C::kQueryBytes; }
  __device__ uint32_t dout(uint32_t slot) const { return base + C::kDoAt + slot * C::kQueryBytes; }
  __device__ uint32_t ds(uint32_t slot) const { return base + C::kDsAt + slot * C::kDsBytes; }
  __device__ uint32_t stats(uint32_t slot) const { return base + C::kStatsAt + slot * C::kStatBytes; }
  __device__ uint32_t layer(uint32_t slot) const { return base + C::kLayersAt + slot * C::kLayerBytes; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t unit_full(uint32_t s) const { return bar(0 + s); }
  __device__ uint32_t unit_empty(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t layer_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t layer_empty(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t kv_raw() const { return bar(8); }  // arrived, but perhaps with rows to be cleared
  __device__ uint32_t kv_full() const { return bar(9); }
  __device__ uint32_t kv_empty() const { return bar(10); }
  __device__ uint32_t q_full(uint32_t s) const { return bar(11 + s); }  // with the stats
  __device__ uint32_t q_empty(uint32_t s) const { return bar(14 + s); }
  __device__ uint32_t do_full(uint32_t s) const { return bar(17 + s); }
  __device__ uint32_t do_empty(uint32_t s) const { return bar(20 + s); }
  __device__ uint32_t q_raw(uint32_t s) const { return bar(23 + s); }  // of Q, stats and dO together
  __device__ uint32_t issued() const { return bar(26); }  // all copies of a unit
  // A unit as four words: tile (-1: no more work), kv head, number of layers, part of the heads and pass.
  __device__ uint32_t unit(uint32_t s) const { return bar(28) + 16 * s; }

  __device__ void init_barriers() const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(unit_full(s), 1);
      mbar_init(unit_empty(s), C::kConsumerWarps + 2);
      mbar_init(layer_full(s), 1);
      mbar_init(layer_empty(s), C::kConsumerWarps + 2);
    }
    mbar_init(kv_raw(), 1);
    mbar_init(kv_full(), 1);
    mbar_init(kv_empty(), C::kGroups);
    mbar_init(issued(), 1);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(q_full(s), 1);
      mbar_init(q_empty(s), C::kConsumerWarps);
      mbar_init(do_full(s), 1);
      mbar_init(do_empty(s), C::kConsumerWarps);
      mbar_init(q_raw(s), 1);
    }
    mbar_init_fence();
  }
};

// Fourth word of a unit: which query heads, which columns, and whether it starts when others are on their way.
template <typename C>
struct BwdPart {
  int32_t heads, pass;
  bool late;
  __device__ static BwdPart of_word(int32_t word) {
    return {(word & 0xffff) / C::kPasses, (word & 0xffff) % C::kPasses, (word >> 16) != 0};
  }
};

// The order in which a unit takes the blocks of queries of a layer. They lie on a grid that all tiles share, because their
// dq is summed. What CTAs do at the same time should be the same blocks, which are then in L2. Under a causal mask tile i of
// n sees the blocks from i on. Let a CTA that starts early take as many from the end, backwards, as it has none at the
// start, then the rest forwards; and one that starts when a long tile is done, so with a short one, all forwards. Then at
// time t every CTA is at block t or at block n - t.
template <typename C>
struct BlockOrder {
  int block, first;
  int left;       // this block included
  int backwards;  // of them

  __device__ __forceinline__ BlockOrder() = default;
  __device__ __forceinline__ BlockOrder(int2 visit, bool late) {
    first = visit.x / C::kQueries;
    const int end = (visit.y + C::kQueries - 1) / C::kQueries;
    left = end - first;
    backwards = late ? 0 : min(first, left);
    block = backwards > 0 ? end - 1 : first;
  }
  __device__ __forceinline__ void step() {
    --left;
    if (backwards > 0)
      block = --backwards > 0 ? block - 1 : first;
    else
      ++block;
  }
};

// One lane. There are few units and they are long, so the next one is taken as late as possible, when all copies of the one
// before have been issued: the look-ups then travel behind its last steps.
template <typename C>
__device__ void schedule_bwd(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < p.num_units; unit = atomicAdd(p.workspace, 1) + gridDim.x) {
    mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
    const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
    int rank, head_unit;
    unit_coords(p, unit / p.unit_parts, &rank, &head_unit);
    const int tile = p.plan[plan.words_order + rank];
    const int2 desc = *reinterpret_cast<const int2*>(p.plan + plan.words_tiles + 8 * tile +
                                                     offsetof(magi_tile_desc, layer_begin) / 4);
    const int late = unit % p.units_per_section >= gridDim.x ? 1 : 0;
    publish_unit(p, smem, turns, tile, head_unit, desc, unit % p.unit_parts | late << 16, plan.words_records, C::kLayerBytes / 4);
    mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // a phase for each unit, and this one has been counted
  }
  publish_end(p, smem, turns);
}

// The queries of a step, of Q or dO.
template <typename C>
__device__ __forceinline__ void load_stage(uint32_t to, const CUtensorMap* map, uint32_t bar, int block, int head) {
#pragma unroll
  for (int d = 0; d < C::kD / 64; ++d)
    load_tile_3d(to + d * C::kQueries * 128, map, bar, d * 64, block * C::kQueries, head, kEvictLast);
}

// One lane. Copies K and V of each unit, and Q, dO and their stats of each step.
template <typename C>
__device__ void copy_steps(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kStages> ring;
  const bool clears = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->has_unseen != 0;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    mbar_wait(smem.kv_empty(), turns.kv_phase() ^ 1);
    if (unit.z == 0) {  // nothing to load, but dk and dv are staged there
      mbar_arrive(smem.kv_raw());
    } else {
      mbar_expect(smem.kv_raw(), 2 * C::kKeyBytes);
#pragma unroll
      for (int d = 0; d < C::kD / 64; ++d) {
        load_tile_3d(smem.k() + d * C::kKeys * 128, &p.k_map, smem.kv_raw(), d * 64, unit.x * C::kKeys, unit.y, kEvictFirst);
        load_tile_3d(smem.v() + d * C::kKeys * 128, &p.v_map, smem.kv_raw(), d * 64, unit.x * C::kKeys, unit.y, kEvictFirst);
      }
    }
    const int heads = p.heads_per_part;
    const bool late = BwdPart<C>::of_word(unit.w).late;
    int head = unit.y * (p.heads_q / p.heads_kv) + BwdPart<C>::of_word(unit.w).heads * heads;
#pragma unroll 1
    for (int left = unit.z; left > 0; --left) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      BlockOrder<C> order(lds_int2(smem.layer(turns.layer_slot())), late);
      mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
      const int end_head = head + heads;
#pragma unroll 1
      for (; order.left > 0; order.step()) {
#pragma unroll 1
        for (; head < end_head; ++head) {
          mbar_wait(smem.q_empty(ring.slot), ring.phase ^ 1);
          const uint32_t q_bar = clears ? smem.q_raw(ring.slot) : smem.q_full(ring.slot);
          mbar_expect(q_bar, C::kQueryBytes + C::kStatBytes + (clears ? C::kQueryBytes : 0));
          load_stage<C>(smem.q(ring.slot), &p.q_map, q_bar, order.block, head);
          const uint32_t row = head * p.query_blocks + order.block;  // 32 bits do: a row stands for 64 tokens
          load_bytes(smem.stats(ring.slot), p.stats + static_cast<uint64_t>(row) * kStatFloats, C::kStatBytes, q_bar);
          mbar_wait(smem.do_empty(ring.slot), ring.phase ^ 1);
          if (!clears) mbar_expect(smem.do_full(ring.slot), C::kQueryBytes);
          load_stage<C>(smem.dout(ring.slot), &p.do_map, clears ? q_bar : smem.do_full(ring.slot), order.block, head);
          ring.advance();
        }
        head -= heads;
      }
    }
    mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

// Zeroes a row of a tile of `rows` rows.
template <typename C>
__device__ __forceinline__ void clear_row(uint32_t tile, int rows, int row) {
#pragma unroll 1
  for (int chunk = 0; chunk < C::kD / 8; ++chunk)
    asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(tile + chunk / 8 * rows * 128 + row * 128 + chunk % 8 * 16),
                 "r"(0)
                 : "memory");
}

// Bit j: whether row lane + 32 j of a tile has an interval in any of its layers.
template <typename C>
__device__ __forceinline__ uint32_t seen_rows(const int32_t* plan, int tile, int layers, int lane) {
  const magi_tile_plan_header& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  const int first = plan[header.words_tiles + 8 * tile + offsetof(magi_tile_desc, layer_begin) / 4];
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
// clears the rows of such keys in every unit, and those of such queries where the mask has any.
template <typename C>
__device__ void clear_unseen(const BwdKernelParams& p, const BwdSmem<C>& smem, int lane) {
  Turns turns;
  Ring<C::kStages> ring;
  while (true) {
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
    const bool clears = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->has_unseen != 0;
#pragma unroll 1
    for (int left = unit.z; left > 0; --left) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      const int blocks = BlockOrder<C>(lds_int2(smem.layer(turns.layer_slot())), false).left;
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
      if (!clears) continue;
#pragma unroll 1
      for (int i = p.heads_per_part * blocks; i > 0; --i) {
        mbar_wait(smem.q_raw(ring.slot), ring.phase);
#pragma unroll 1
        for (int row = lane; row < C::kQueries; row += 32) {
          const uint32_t offset = smem.stats(ring.slot) + 4 * row;
          if (__int_as_float(lds_int(offset)) != INFINITY) continue;
          clear_row<C>(smem.q(ring.slot), C::kQueries, row);
          clear_row<C>(smem.dout(ring.slot), C::kQueries, row);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          mbar_arrive(smem.q_full(ring.slot));
          mbar_arrive(smem.do_full(ring.slot));
        }
        ring.advance();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

}  // namespace magi
