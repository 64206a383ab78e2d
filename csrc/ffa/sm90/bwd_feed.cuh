// SPDX-License-Identifier: Apache-2.0
// The feeding side of the backward kernel: a lane of warpgroup 0 that says what each step is and copies its Q and dO; and the copies of K
// and V. Beside it others hand out units (bwd_units.cuh), add dq (bwd_add.cuh) and clear rows (bwd_clear.cuh).
#pragma once

#include <type_traits>

#include "../common/copy.cuh"
#include "bwd_complete.cuh"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"
#include "bwd_split.cuh"
#include "schedule.cuh"

namespace magi {

// Whether a warpgroup needs a mask for a block: not all its keys see all of it.
template <typename C>
__device__ __forceinline__ int needs_mask(uint32_t layer, int group, int block) {
  const int2 full = lds_int2(layer + 32 + 16 * group + 8);
  return block * C::kQueries < full.x || (block + 1) * C::kQueries > full.y ? kMasked : 0;
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
  const int word = lds_int(unit + 12);
  if (C::kListed && is_cut(word)) return lds_int(unit + 4) * p.group;
  return lds_int(unit + 4) * p.group + BwdPart<C>::of_word(word).heads * heads_of_unit<C>(p, word);
}

// Copies dO of a step. The barrier it arrives at is that of Q as well where rows are cleared before they are handed over.
template <typename C>
__device__ __forceinline__ void copy_dout(const BwdKernelParams& p, const BwdSmem<C>& smem, const Ring<C::kStages>& ring) {
  mbar_wait(smem.do_empty(ring.slot), ring.phase ^ 1);
  const bool clears = has_unseen(p);
  const uint32_t bar = clears ? smem.q_raw(ring.slot) : smem.do_full(ring.slot);
  if (!clears) mbar_expect(bar, C::kQueryBytes);
  const int4 step = lds_int4(smem.step(ring.slot));
  const int head = C::kSole ? (step.w & kSoleVisit - 1) >> kStepHeadBit : step.w >> kStepHeadBit;
  load_rows<C>(smem.dout(ring.slot), C::kQueries, &p.do_map, bar, step.y, head, kEvictLast);
}

// Until the rows of a block are prepared, for the heads of the unit; where units are listed.
template <typename C>
__device__ __forceinline__ void wait_until_prepared(const BwdKernelParams& p, const BwdSmem<C>& smem, int block, uint32_t unit) {
  if (lds_int(smem.prepared())) return;
  while (load_acquire(p.completion.prepared + block * p.heads_kv + lds_int(unit + 4)) < p.group) {
  }
  fence_proxies();
  if (load_acquire(p.workspace + kPreparedWord) == p.prepare_groups) sts_int(smem.prepared(), 1);
}

// Where a lane is among the steps: in the ring of stages and, in order, of the places of what the lanes that add are told, in one
// register.
template <typename C>
struct StepRing {
  Ring<C::kStages> ring;
  __device__ __forceinline__ Ring<C::kStages> now() const { return ring; }
  __device__ __forceinline__ void advance() { ring.advance(); }
};
template <typename C>
struct TwoRings {
  uint32_t place = 0;
  __device__ __forceinline__ Ring<C::kStages> now() const { return {place % C::kStages, C::kStages == 2 ? place >> 1 : place}; }
  __device__ __forceinline__ void advance() { place = (place + 1) % C::kToldSlots; }
};
template <typename C>
using Steps = std::conditional_t<C::kOrdered, TwoRings<C>, StepRing<C>>;

// One lane. Says what each step is, and copies its Q, stats and dO.
template <typename C>
__device__ void copy_queries(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Steps<C> steps;
  if constexpr (C::kListed) sts_int(smem.prepared(), 0);
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
#pragma unroll 1
    for (sts_int(smem.left(), unit.z); lds_int(smem.left()) > 0; sts_int(smem.left(), lds_int(smem.left()) - 1)) {
      mbar_wait(smem.layer_full(turns.layer_slot()), turns.layer_phase());
      const bool is_banded = !C::kOrdered && is_band(lds_int4(smem.layer(turns.layer_slot()) + 32));
      auto by_head = [&] { return C::kOrdered ? (lds_int(smem.unit(turns.unit_slot()) + 12) >> kByHeadBit & 1) != 0 : is_banded; };
      auto heads = [&] {
        if constexpr (C::kSplit && C::kOrdered) return lds_int(smem.unit_turns(turns.unit_slot())) >> 16;
        return C::kSplit ? heads_of_unit<C>(p, lds_int(smem.unit(turns.unit_slot()) + 12)) : p.heads_per_part;
      };
      int i = 0;
      do {
        auto blocks = [&] { return blocks_of_unit<C>(smem.layer(turns.layer_slot()), lds_int(smem.unit(turns.unit_slot()) + 12)); };
        auto word = [&] { return lds_int(smem.unit(turns.unit_slot()) + 12); };
        auto way = [&] { return Way(word() >> kWayBit & 3); };
        auto step = [&](BlockOrder& order) {
          if constexpr (C::kOrdered && !C::kSplit)
            order.step(blocks, [&] { return way() == Way::kBackwards; });
          else
            order.step(blocks);
        };
        BlockOrder order = C::kTold      ? BlockOrder(blocks(), word() >> kToldBit & MAGI_WALK_EARLY)
                           : C::kOrdered && !C::kSplit ? BlockOrder(blocks(), way(), word() >> kShiftBit)
                                         : BlockOrder(blocks(), way());
#pragma unroll 1
        for (; order.left() > 0; step(order)) {
          if constexpr (C::kSole) sts_int(smem.sole(), load_relaxed(p.sole_visits + order.block));
          do {
            const Ring<C::kStages> ring = steps.now();
            mbar_wait(smem.q_empty(ring.slot), ring.phase ^ 1);
            if constexpr (C::kListed)
              if ((i == 0 || is_banded) && p.units != nullptr) wait_until_prepared(p, smem, order.block, smem.unit(turns.unit_slot()));
            int head = i;
            if constexpr (C::kSplit && C::kOrdered)
              head += lds_int(smem.unit_turns(turns.unit_slot())) & 0xffff;
            else
              head += first_head<C>(p, smem.unit(turns.unit_slot()));
            const uint32_t number = head * p.query_blocks + order.block;  // 32 bits do: it stands for 64 tokens
            int what = turns.layer_slot() << kLayerSlotBit | head << kStepHeadBit;
            if (order.left() == 1 && i + 1 == heads()) what |= lds_int(smem.left()) == 1 ? kLayerEnds | kUnitEnds : kLayerEnds;
            auto word_of = [&](int group) { return what | needs_mask<C>(smem.layer(turns.layer_slot()), group, order.block); };
            if constexpr (!C::kSole) {
              sts_int4(smem.step(ring.slot), number, order.block * C::kQueries, word_of(0), word_of(1));
            } else {
              // Word by word, and this late, as there are few registers.
              sts_int2(smem.step(ring.slot), number, order.block * C::kQueries);
              what |= lds_int(smem.sole());
              sts_int(smem.step(ring.slot) + 8, word_of(0));
              sts_int(smem.step(ring.slot) + 12, word_of(1));
            }
            if constexpr (C::kOrdered) {
              const int pass = C::kPasses > 1 ? BwdPart<C>::of_word(lds_int(smem.unit(turns.unit_slot()) + 12)).pass : 0;
              const uint32_t place = C::kStages == 2 ? 2 * ring.phase + ring.slot : steps.place;  // without a register of its own
              uint32_t told = (number * C::kPasses + pass) | static_cast<uint32_t>(what & kUnitEnds) << 29;
              if constexpr (C::kSole) told |= static_cast<uint32_t>(what & kSoleVisit) << 11;
              sts_int(smem.told(place), told);
              mbar_arrive(smem.step_full(place));
            }
            const uint32_t bar = has_unseen(p) ? smem.q_raw(ring.slot) : smem.q_full(ring.slot);
            mbar_expect(bar, C::kQueryBytes + C::kStatBytes + (bar == smem.q_raw(ring.slot) ? C::kQueryBytes : 0));
            load_bytes(smem.stats(ring.slot), p.stats + static_cast<uint64_t>(number) * stat_floats(C::kQueries), C::kStatBytes, bar);
            load_rows<C>(smem.q(ring.slot), C::kQueries, &p.q_map, bar, order.block * C::kQueries, head, kEvictLast);
            copy_dout<C>(p, smem, ring);
            steps.advance();
          } while (!by_head() && ++i < heads());
          if (!by_head()) i = 0;
        }
      } while (by_head() && ++i < heads());
      mbar_arrive(smem.layer_empty(turns.layer_slot()));
      turns.next_layer();
    }
    if constexpr (!C::kOrdered) mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

// K and V of a unit, which has keys to look at.
template <typename C>
__device__ __forceinline__ void load_keys(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t unit_at) {
  const int2 unit = lds_int2(unit_at);  // its tile and its head
  mbar_expect(smem.kv_raw(), 2 * C::kKeyBytes);
  if (unit.x * C::kKeys < p.remote.base) {
    load_rows<C>(smem.k(), C::kKeys, &p.k_map, smem.kv_raw(), unit.x * C::kKeys, unit.y, kEvictFirst);
    load_rows<C>(smem.v(), C::kKeys, &p.v_map, smem.kv_raw(), unit.x * C::kKeys, unit.y, kEvictFirst);
  } else {
    wait_for_tile(p.remote, unit.x - p.remote.base / kRemoteTile);
    const int tile = lds_int(unit_at);
    const int head = lds_int(unit_at + 4);
    load_rows<C>(smem.k(), C::kKeys, &p.remote.k_map, smem.kv_raw(), tile * C::kKeys - p.remote.base, head, kEvictFirst);
    load_rows<C>(smem.v(), C::kKeys, &p.remote.v_map, smem.kv_raw(), tile * C::kKeys - p.remote.base, head, kEvictFirst);
  }
}

}  // namespace magi
