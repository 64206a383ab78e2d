// SPDX-License-Identifier: Apache-2.0
// The feeding side of the backward kernel: its shared memory, and the four parts of warpgroup 0, which hand out units, copy Q
// and say what each step is, copy the rest, and clear rows of keys and queries that take part in nothing.
#pragma once

#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/copy.cuh"
#include "../common/shared.cuh"
#include "bwd_config.h"
#include "bwd_params.h"
#include "bwd_plan.cuh"
#include "bwd_turns.cuh"
#include "schedule.cuh"

namespace magi {

// Whether there are queries that see nothing.
__device__ __forceinline__ bool has_unseen(const BwdKernelParams& p) {
  int32_t flag;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(flag) : "l"(p.plan + offsetof(magi_tile_plan_header, has_unseen) / 4));
  return flag != 0;
}

template <typename C>
struct BwdSmem {
  // Where dynamic shared memory starts on sm_90 if there is no other: behind what the system reserves. A constant, because
  // an address in a register for the whole kernel is one too many; the kernel checks it.
  static constexpr uint32_t base = 1024;

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
  __device__ uint32_t issued() const { return bar(11); }           // all copies of a unit
  __device__ uint32_t q_full(uint32_t s) const { return bar(12 + s); }  // with the stats
  __device__ uint32_t q_empty(uint32_t s) const { return bar(12 + C::kStages + s); }
  __device__ uint32_t do_full(uint32_t s) const { return bar(12 + 2 * C::kStages + s); }
  __device__ uint32_t do_empty(uint32_t s) const { return bar(12 + 3 * C::kStages + s); }
  __device__ uint32_t q_raw(uint32_t s) const { return bar(12 + 4 * C::kStages + s); }  // of Q, stats and dO together
  __device__ uint32_t step_full(uint32_t s) const { return bar(12 + 5 * C::kStages + s); }  // its four words are there
  // A unit as four words: tile (-1: no more work), kv head, number of layers, part of the heads and pass.
  __device__ uint32_t unit(uint32_t s) const { return base + C::kUnitsAt + 16 * s; }
  // A step as four words: number of its head and block, first query, and what each warpgroup needs to know (of one bit more
  // than the layer's slot on, the head).
  __device__ uint32_t step(uint32_t s) const { return base + C::kStepsAt + 16 * s; }

  // Of a step whose dq is added in order: number of its part of dq_sum, and its turn.
  __device__ uint32_t turn(uint32_t s) const { return base + C::kTurnsAt + 8 * s; }
  __device__ uint32_t dq() const { return base + C::kDqAt; }
  __device__ uint32_t dq_full() const { return bar(12 + 6 * C::kStages); }
  __device__ uint32_t dq_empty() const { return bar(13 + 6 * C::kStages); }

  // With `clears` Q, stats and dO are handed over by a whole warp, lane by lane.
  __device__ void init_barriers(bool clears) const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(unit_full(s), 1);
      mbar_init(unit_empty(s), C::kConsumerWarps + 3);
      mbar_init(layer_full(s), 1);
      mbar_init(layer_empty(s), C::kConsumerWarps + 2);
    }
    mbar_init(kv_raw(), 1);
    mbar_init(kv_full(), 1);
    mbar_init(kv_empty(), C::kGroups);
    mbar_init(issued(), 1);
    if constexpr (C::kOrdered) {
      mbar_init(dq_full(), C::kConsumerWarps);
      mbar_init(dq_empty(), 1);
    }
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(q_full(s), clears ? 32 : 1);
      mbar_init(q_empty(s), C::kConsumerWarps);
      mbar_init(do_full(s), clears ? 32 : 1);
      mbar_init(do_empty(s), C::kConsumerWarps);
      mbar_init(q_raw(s), 1);
      mbar_init(step_full(s), 1);
    }
    mbar_init_fence();
  }
};

// Fourth word of a unit: which query heads, which columns, and how it walks its layers.
template <typename C>
struct BwdPart {
  int32_t heads, pass;
  __device__ static BwdPart of_word(int32_t word) { return {(word & 0xffff) / C::kPasses, (word & 0xffff) % C::kPasses}; }
};
constexpr int kWayBit = 16, kByHeadBit = 18;

// What a warpgroup needs to know of a step, in one word: flags, and the slot of the layer.
constexpr int kMasked = 1, kLayerEnds = 2, kUnitEnds = 4, kLayerSlotBit = 3, kStepHeadBit = 4;

// Whether a warpgroup needs a mask for a block: not all its keys see all of it.
template <typename C>
__device__ __forceinline__ int needs_mask(uint32_t layer, int group, int block) {
  const int2 full = lds_int2(layer + 32 + 16 * group + 8);
  return block * C::kQueries < full.x || (block + 1) * C::kQueries > full.y ? kMasked : 0;
}

// In order, a unit may wait for those before it, so they are taken up in order too, whichever CTA starts first.
template <typename C>
__device__ __forceinline__ int next_unit(const BwdKernelParams& p) {
  return atomicAdd(p.workspace, 1) + (C::kOrdered ? 0 : gridDim.x);
}
template <typename C>
__device__ __forceinline__ int first_unit(const BwdKernelParams& p) {
  return C::kOrdered ? next_unit<C>(p) : blockIdx.x;
}

// One lane. There are few units and they are long, so the next one is taken as late as possible, when all copies of the one
// before have been issued: the look-ups then travel behind its last steps.
template <typename C>
__device__ void schedule_bwd(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
#pragma unroll 1
  for (int unit = first_unit<C>(p); unit < p.num_units; unit = next_unit<C>(p)) {
    mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
    const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
    int rank, head_unit;
    unit_coords(p, unit / p.unit_parts, &rank, &head_unit);
    const int tile = p.plan[plan.words_order + rank];
    const int2 desc = layers_of_tile(p.plan, tile);
    Way way = unit % p.units_per_section >= gridDim.x ? Way::kForwards : Way::kEarly;
    int by_head = 0;  // told for each layer
    if constexpr (C::kOrdered) {
      way = ordered_way(p.order[0], rank >= p.wave);
      by_head = p.order[0] & kByHead ? 1 << kByHeadBit : 0;
    }
    publish_unit(p, smem, turns, tile, head_unit, desc, unit % p.unit_parts | static_cast<int>(way) << kWayBit | by_head,
                 plan.words_records, C::kLayerBytes / 4);
    mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // a phase for each unit, and this one has been counted
  }
  publish_end(p, smem, turns);
}

// A tile of `rows` rows from the first on, in column tiles of 64.
template <typename C>
__device__ __forceinline__ void load_rows(uint32_t to, int rows, const CUtensorMap* map, uint32_t bar, int first, int head,
                                          uint64_t policy) {
#pragma unroll
  for (int d = 0; d < C::kD / 64; ++d) load_tile_3d(to + d * rows * 128, map, bar, d * 64, first, head, policy);
}

// Of a unit. Read again and again rather than kept: the feeding lanes have few registers.
template <typename C>
__device__ __forceinline__ int first_head(const BwdKernelParams& p, uint32_t unit) {
  return lds_int(unit + 4) * p.group + BwdPart<C>::of_word(lds_int(unit + 12)).heads * p.heads_per_part;
}

// One lane. Says what each step is, and copies its Q and stats.
template <typename C>
__device__ void copy_queries(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kStages> ring;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
#pragma unroll 1
    for (int left = unit.z; left > 0; --left) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      const bool is_banded = !C::kOrdered && is_band(lds_int4(smem.layer(turns.layer_slot()) + 32));
      auto by_head = [&] { return C::kOrdered ? (lds_int(smem.unit(turns.unit_slot()) + 12) >> kByHeadBit & 1) != 0 : is_banded; };
      int i = 0;
      do {
        BlockOrder order(smem.layer(turns.layer_slot()), Way(lds_int(smem.unit(turns.unit_slot()) + 12) >> kWayBit & 3));
#pragma unroll 1
        for (; order.left() > 0; order.step(smem.layer(turns.layer_slot()))) {
          do {
            mbar_wait(smem.q_empty(ring.slot), ring.phase ^ 1);
            const int head = first_head<C>(p, smem.unit(turns.unit_slot())) + i;
            const uint32_t number = head * p.query_blocks + order.block;  // 32 bits do: it stands for 64 tokens
            int what = turns.layer_slot() << kLayerSlotBit | head << kStepHeadBit;
            if (order.left() == 1 && i + 1 == p.heads_per_part) what |= left == 1 ? kLayerEnds | kUnitEnds : kLayerEnds;
            sts_int4(smem.step(ring.slot), number, order.block * C::kQueries,
                     what | needs_mask<C>(smem.layer(turns.layer_slot()), 0, order.block),
                     what | needs_mask<C>(smem.layer(turns.layer_slot()), 1, order.block));
            mbar_arrive(smem.step_full(ring.slot));
            const uint32_t bar = has_unseen(p) ? smem.q_raw(ring.slot) : smem.q_full(ring.slot);
            mbar_expect(bar, C::kQueryBytes + C::kStatBytes + (bar == smem.q_raw(ring.slot) ? C::kQueryBytes : 0));
            load_bytes(smem.stats(ring.slot), p.stats + static_cast<uint64_t>(number) * kStatFloats, C::kStatBytes, bar);
            load_rows<C>(smem.q(ring.slot), C::kQueries, &p.q_map, bar, order.block * C::kQueries, head, kEvictLast);
            ring.advance();
          } while (!by_head() && ++i < p.heads_per_part);
          if (!by_head()) i = 0;
        }
      } while (by_head() && ++i < p.heads_per_part);
      mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
    }
    mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

// Copies dO of a step. The barrier it arrives at is that of Q as well where rows are cleared before they are handed over.
template <typename C>
__device__ __forceinline__ void copy_dout(const BwdKernelParams& p, const BwdSmem<C>& smem, const Ring<C::kStages>& ring,
                                          int first_query, int head, bool clears) {
  mbar_wait(smem.do_empty(ring.slot), ring.phase ^ 1);
  const uint32_t bar = clears ? smem.q_raw(ring.slot) : smem.do_full(ring.slot);
  if (!clears) mbar_expect(bar, C::kQueryBytes);
  load_rows<C>(smem.dout(ring.slot), C::kQueries, &p.do_map, bar, first_query, head, kEvictLast);
}

// dO of all steps of a unit, and dq of each in its turn. The words of a step may be written anew when its Q has been used, which
// is before its dq is added; so what that needs is kept elsewhere. Steps count as layers in `turns`.
template <typename C>
__device__ __forceinline__ void copy_dout_add_dq(const BwdKernelParams& p, const BwdSmem<C>& smem, Turns& turns,
                                                 Ring<C::kStages>& ring) {
  int ahead = 0, seen = -1;
  bool ends = lds_int(smem.unit(turns.unit_slot()) + 8) == 0;
#pragma unroll 1
  while (!ends || ahead > 0) {
    if (!ends && ahead < C::kStages) {
      mbar_wait(smem.step_full(ring.slot), ring.phase);
      const int4 step = lds_int4(smem.step(ring.slot));
      copy_dout<C>(p, smem, ring, step.y, step.w >> kStepHeadBit, has_unseen(p));
      const int pass = C::kPasses > 1 ? BwdPart<C>::of_word(lds_int(smem.unit(turns.unit_slot()) + 12)).pass : 0;
      const int64_t row = static_cast<int64_t>(step.y / kQueryBlock) * p.num_tiles;
      sts_int2(smem.turn(ring.slot), step.x * C::kPasses + pass, p.turns[row + lds_int(smem.unit(turns.unit_slot()))]);
      ends = step.z & kUnitEnds;
      ring.advance();
      ++ahead;
    } else {
      mbar_wait(smem.dq_full(), turns.layer_slot());
      turns.next_layer();
      auto words_of = [&](int steps) {  // so many steps back
        const int slot = static_cast<int>(ring.slot) - steps;
        return smem.turn(slot < 0 ? slot + C::kStages : slot);
      };
      add_in_turn<C>(p, smem.dq(), smem.dq_empty(), words_of(ahead), ahead > 1 ? words_of(ahead - 1) : 0, seen);
      --ahead;
    }
  }
}

// One lane. Copies K and V of each unit, and dO of each step.
template <typename C>
__device__ void copy_keys_and_dout(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kStages> ring;
  const bool clears = has_unseen(p);
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    mbar_wait(smem.kv_empty(), turns.kv_phase() ^ 1);
    if (unit.z == 0) {  // nothing to load, but dk and dv are staged there
      mbar_arrive(smem.kv_raw());
    } else {
      mbar_expect(smem.kv_raw(), 2 * C::kKeyBytes);
      load_rows<C>(smem.k(), C::kKeys, &p.k_map, smem.kv_raw(), unit.x * C::kKeys, unit.y, kEvictFirst);
      load_rows<C>(smem.v(), C::kKeys, &p.v_map, smem.kv_raw(), unit.x * C::kKeys, unit.y, kEvictFirst);
    }
    if constexpr (C::kOrdered) {
      copy_dout_add_dq<C>(p, smem, turns, ring);
    } else {
#pragma unroll 1
      for (bool more = unit.z > 0; more; ring.advance()) {
        mbar_wait(smem.step_full(ring.slot), ring.phase);
        const int4 step = lds_int4(smem.step(ring.slot));
        more = !(step.z & kUnitEnds);
        mbar_wait(smem.do_empty(ring.slot), ring.phase ^ 1);
        const uint32_t bar = clears ? smem.q_raw(ring.slot) : smem.do_full(ring.slot);
        if (!clears) mbar_expect(bar, C::kQueryBytes);
        load_rows<C>(smem.dout(ring.slot), C::kQueries, &p.do_map, bar, step.y, step.w >> kStepHeadBit, kEvictLast);
      }
    }
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
// clears the rows of such keys in every unit and, where the mask has such queries, all that no key of the tile sees. Not by
// lse: with sinks a query that sees nothing has one.
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
    const bool clears = has_unseen(p);
#pragma unroll 1
    for (int left = unit.z; left > 0; --left) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      const int blocks = BlockOrder(smem.layer(turns.layer_slot()), Way::kForwards).left();
#pragma unroll 1
      for (int i = clears ? p.heads_per_part * blocks : 0; i > 0; --i) {
        mbar_wait(smem.step_full(ring.slot), ring.phase);
        mbar_wait(smem.q_raw(ring.slot), ring.phase);
#pragma unroll 1
        for (int row = lane; row < C::kQueries; row += 32) {
          const int query = lds_int(smem.step(ring.slot) + 4) + row;
          if (is_seen<C>(smem.layer(turns.layer_slot()), query)) continue;
          clear_row<C>(smem.q(ring.slot), C::kQueries, row);
          clear_row<C>(smem.dout(ring.slot), C::kQueries, row);
          sts_int(smem.stats(ring.slot) + 4 * row, __float_as_int(INFINITY));
          sts_int(smem.stats(ring.slot) + 256 + 4 * row, 0);
        }
        fence_async_proxy();
        mbar_arrive(smem.q_full(ring.slot));
        mbar_arrive(smem.do_full(ring.slot));
        ring.advance();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

}  // namespace magi
