// SPDX-License-Identifier: Apache-2.0
// The feeding side of the backward kernel: three lanes of warpgroup 0, which hand out units; say what each step is and copy its Q and
// dO; and copy K and V, and add dq where that leaves by way of shared memory. A fourth warp is in bwd_clear.cuh. Where two lanes add dq
// (C::kAdders), the first of the three is the second of those, and the fourth warp hands out units.
#pragma once

#include <type_traits>

#include "../common/copy.cuh"
#include "bwd_complete.cuh"
#include "bwd_plan.cuh"
#include "bwd_smem.cuh"
#include "bwd_split.cuh"
#include "bwd_turns.cuh"
#include "schedule.cuh"

namespace magi {

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
// before have been issued: the look-ups then travel behind its last steps. In order, when all of its dq has been added: a unit
// that is taken but not begun might be the one whose turn the unit before waits for.
template <typename C>
__device__ void schedule_bwd(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
#pragma unroll 1
  for (int unit = first_unit<C>(p); unit < p.num_units; unit = next_unit<C>(p)) {
    mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
    const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
    int whole = unit, split = 0;  // of parts, the unit they belong to; first parts of all come before second parts
    if (C::kSplit && unit >= p.whole_units) {
      const int in_split = unit - p.whole_units, slot = in_split % p.split_slots;
      whole = p.whole_units + slot;
      split = in_split / p.split_slots | (slot + 1) << kSlotBit;
    }
    int tile, head_unit, walk;
    if constexpr (C::kTold) {
      const int2 told = *reinterpret_cast<const int2*>(p.plan + plan.words_units + 2 * (whole / p.unit_parts));  // magi_walked_unit
      tile = told.x;
      head_unit = told.y >> MAGI_WALK_BITS;
      walk = (told.y & MAGI_WALK_EARLY) << kToldBit;
    } else {
      int rank;
      unit_coords(p, whole / p.unit_parts, &rank, &head_unit);
      // Turns follow the order of the plan.
      tile = C::kOrdered ? p.plan[plan.words_order + rank] : tile_of(p, plan.words_order, plan.words_first_order, whole / p.unit_parts, rank);
      if constexpr (C::kOrdered)
        walk = static_cast<int>(ordered_way(p.order[0], rank >= p.wave)) << kWayBit | (p.order[0] & kByHead ? 1 << kByHeadBit : 0);
      else
        walk = static_cast<int>(whole % p.units_per_section >= gridDim.x ? Way::kForwards : Way::kEarly) << kWayBit;
    }
    if constexpr (C::kOrdered) {
      const int first_head = unit / p.units_per_section * p.heads_per_section;
      sts_int(smem.unit_turns(turns.unit_slot()), tile * p.units_per_tile + (head_unit - first_head) * p.unit_parts + unit % p.unit_parts);
    }
    publish_unit(p, smem, turns, tile, head_unit, layers_of_tile(p.plan, tile), whole % p.unit_parts | split | walk, plan.words_records, C::kLayerBytes / 4);
    mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // a phase for each unit, and this one has been counted
  }
  publish_end(p, smem, turns);
}

// Where a lane is among the steps: in the ring of stages and, where two lanes add, of the places of what they are told, in
// one register.
template <typename C>
struct StepRing {
  Ring<C::kStages> ring;
  __device__ __forceinline__ Ring<C::kStages> now() const { return ring; }
  __device__ __forceinline__ void advance() { ring.advance(); }
};
template <typename C>
struct TwoRings {
  uint32_t place = 0;
  __device__ __forceinline__ Ring<C::kStages> now() const { return {place & 1, place >> 1}; }
  __device__ __forceinline__ void advance() { place = (place + 1) & 3; }
};
template <typename C>
using Steps = std::conditional_t<C::kAdders == 2, TwoRings<C>, StepRing<C>>;

// Layer `layer` of a tile, to where `staged` counts, when the one before has left that.
template <typename C>
__device__ __forceinline__ void stage_layer(const BwdKernelParams& p, const BwdSmem<C>& smem, const Turns& staged, int tile, int layer) {
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  mbar_wait(smem.layer_empty(staged.layer_slot()), staged.layer_phase() ^ 1);
  mbar_expect(smem.layer_full(staged.layer_slot()), C::kLayerBytes);
  const int64_t record = layers_of_tile(p.plan, tile).x + layer;
  load_bytes(smem.layer(staged.layer_slot()), p.plan + plan.words_records + record * (C::kLayerBytes / 4), C::kLayerBytes,
             smem.layer_full(staged.layer_slot()));
}

// The next unit where two lanes add, with its first two layers, by a lane of the warp that clears rows: the one before has been added.
template <typename C>
__device__ __forceinline__ void publish_in_turns(const BwdKernelParams& p, const BwdSmem<C>& smem, Turns staged) {
  const int unit = atomicAdd(p.workspace, 1);
  if (unit >= p.num_units) return publish_none(smem, staged);
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  mbar_wait(smem.unit_empty(staged.unit_slot()), staged.unit_phase() ^ 1);
  // Word by word, as there are few registers.
  const uint32_t at = smem.unit(staged.unit_slot());
  int rank, head;
  unit_coords(p, unit / p.unit_parts, &rank, &head);
  const int part = unit % p.unit_parts, in_section = head - unit / p.units_per_section * p.heads_per_section;
  sts_int(at + 4, head);
  sts_int(at + 12, static_cast<int>(ordered_way(p.order[0], rank >= p.wave)) << kWayBit | (p.order[0] & kByHead ? 1 << kByHeadBit : 0) | part);
  const int tile = p.plan[plan.words_order + rank];
  sts_int(at, tile);
  sts_int(smem.unit_turns(staged.unit_slot()), tile * p.units_per_tile + in_section * p.unit_parts + part);
  sts_int(at + 8, layers_of_tile(p.plan, tile).y);
  mbar_arrive(smem.unit_full(staged.unit_slot()));
#pragma unroll 1
  for (int layer = 0; layer < min(lds_int(at + 8), 2); ++layer, staged.next_layer()) stage_layer(p, smem, staged, tile, layer);
}

// The same where the units have been listed.
template <typename C>
__device__ void schedule_listed(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  while (load_acquire(p.workspace + kListedWord) == 0) {
  }
  start_next_kernel();  // which may not even read what is listed before it is
#pragma unroll 1
  for (int unit = atomicAdd(p.workspace, 1); unit < p.workspace[kUnitsWord]; unit = atomicAdd(p.workspace, 1)) {
    mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
    const int4 row = p.units[unit];
    const int records_at = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_records;
    publish_unit(p, smem, turns, row.x, row.y, layers_of_tile(p.plan, row.x), row.z, records_at, C::kLayerBytes / 4);
    mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // as above
  }
  publish_end(p, smem, turns);
  wait_for_kernel_before();  // so that what comes behind this kernel is behind that, too
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
  load_rows<C>(smem.dout(ring.slot), C::kQueries, &p.do_map, bar, step.y, step.w >> kStepHeadBit, kEvictLast);
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
      auto heads = [&] { return C::kSplit ? heads_of_unit<C>(p, lds_int(smem.unit(turns.unit_slot()) + 12)) : p.heads_per_part; };
      int i = 0;
      do {
        auto blocks = [&] { return blocks_of_unit<C>(smem.layer(turns.layer_slot()), lds_int(smem.unit(turns.unit_slot()) + 12)); };
        BlockOrder order = C::kTold ? BlockOrder(blocks(), lds_int(smem.unit(turns.unit_slot()) + 12) >> kToldBit & MAGI_WALK_EARLY)
                                    : BlockOrder(blocks(), Way(lds_int(smem.unit(turns.unit_slot()) + 12) >> kWayBit & 3));
#pragma unroll 1
        for (; order.left() > 0; order.step(blocks)) {
          do {
            const Ring<C::kStages> ring = steps.now();
            mbar_wait(smem.q_empty(ring.slot), ring.phase ^ 1);
            if constexpr (C::kListed)
              if ((i == 0 || is_banded) && p.units != nullptr) wait_until_prepared(p, smem, order.block, smem.unit(turns.unit_slot()));
            const int head = first_head<C>(p, smem.unit(turns.unit_slot())) + i;
            const uint32_t number = head * p.query_blocks + order.block;  // 32 bits do: it stands for 64 tokens
            int what = turns.layer_slot() << kLayerSlotBit | head << kStepHeadBit;
            if (order.left() == 1 && i + 1 == heads()) what |= lds_int(smem.left()) == 1 ? kLayerEnds | kUnitEnds : kLayerEnds;
            sts_int4(smem.step(ring.slot), number, order.block * C::kQueries,
                     what | needs_mask<C>(smem.layer(turns.layer_slot()), 0, order.block),
                     what | needs_mask<C>(smem.layer(turns.layer_slot()), 1, order.block));
            if constexpr (C::kAdders == 2) {
              const uint32_t place = 2 * ring.phase + ring.slot;
              sts_int(smem.told(place), number | static_cast<uint32_t>(what & kUnitEnds) << 29);
              mbar_arrive(smem.step_full(place));
            } else if constexpr (C::kOrdered) {
              mbar_arrive(smem.step_full(ring.slot));
            }
            const uint32_t bar = has_unseen(p) ? smem.q_raw(ring.slot) : smem.q_full(ring.slot);
            mbar_expect(bar, C::kQueryBytes + C::kStatBytes + (bar == smem.q_raw(ring.slot) ? C::kQueryBytes : 0));
            load_bytes(smem.stats(ring.slot), p.stats + static_cast<uint64_t>(number) * stat_floats(C::kQueries), C::kStatBytes, bar);
            load_rows<C>(smem.q(ring.slot), C::kQueries, &p.q_map, bar, order.block * C::kQueries, head, kEvictLast);
            if constexpr (C::kDoutWithQ) copy_dout<C>(p, smem, ring);
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

// Copies K and V of a unit, and adds dq of all its steps, each in its turn. The words of a step may be written anew when its Q has
// been used, which is before its dq is added; so what that needs is kept elsewhere. They are read in time: the first step is looked
// at before the keys are asked for, without which it does not end, and later ones while an earlier one has not been added,
// until when they cannot hand over their own. Steps count as layers in `turns`.
template <typename C>
__device__ __forceinline__ void add_dq_in_turns(const BwdKernelParams& p, const BwdSmem<C>& smem, Turns& turns,
                                                Ring<C::kStages>& ring) {
  int ahead = 0, seen = -1, turn = 0;  // of the last step looked at: it travels behind what is done meanwhile
  bool ends = false;
  auto words_of = [&](int steps) {  // so many steps back
    const int slot = static_cast<int>(ring.slot) - steps;
    return smem.turn(slot < 0 ? slot + C::kStages : slot);
  };
  auto look = [&] {
    mbar_wait(smem.step_full(ring.slot), ring.phase);
    const int4 step = lds_int4(smem.step(ring.slot));
    if constexpr (!C::kDoutWithQ) copy_dout<C>(p, smem, ring);
    const int pass = C::kPasses > 1 ? BwdPart<C>::of_word(lds_int(smem.unit(turns.unit_slot()) + 12)).pass : 0;
    sts_int(smem.turn(ring.slot), step.x * C::kPasses + pass);
    const int unit_at = lds_int(smem.unit_turns(turns.unit_slot()));
    turn = p.turns[static_cast<int64_t>(block_of<C::kQueries>(step.y)) * p.turns_per_block + unit_at];
    ends = step.z & kUnitEnds;
    ring.advance();
    ++ahead;
  };
  look();
  load_keys<C>(p, smem, smem.unit(turns.unit_slot()));
#pragma unroll 1
  while (!ends || ahead > 0) {
    if (!ends && ahead < C::kStages) {
      if (ahead > 0) sts_int(words_of(1) + 4, turn);
      look();
    } else {
      mbar_wait(smem.dq_full(0), turns.layer_slot());
      turns.next_layer();
      if (ahead == 1) sts_int(words_of(1) + 4, turn);
      add_in_turn<C>(p, smem.dq(), smem.dq_empty(0), words_of(ahead), ahead > 1 ? words_of(ahead - 1) : 0, seen);
      if (--ahead > 0) sts_int(words_of(1) + 4, turn);
    }
  }
}

// Whether one lane adds all steps after all: where a tile visits a block in several layers, all its visits have the same turn, and come one
// after the other only if one lane adds them.
__device__ __forceinline__ bool adds_alone(const BwdKernelParams& p) { return !(p.order[0] & (kTimed | kInWaves)); }

// The same by two lanes, each of which adds every second step, counted from the start of the CTA: `kWho` 0 or 1, the number of the first.
// To add takes a lane longer than a step takes the warpgroups, mostly until it is complete and passed on. Each looks at all steps, to know
// which is the last of the unit. The words of a step are there until four steps later: that one is told when Q of the second after it has been
// used, which is when dq of the first after it has been taken up, by lanes that have looked at both.
template <typename C, int kWho>
__device__ __forceinline__ void add_every_second(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t unit_slot, Ring<C::kTurnSlots>& ring) {
  static_assert(C::kPasses == 1 && C::kTurnSlots == 4);
  bool ends;
#pragma unroll 1
  do {
    mbar_wait(smem.step_full(ring.slot), ring.phase);
    const uint32_t told = lds_int(smem.told(ring.slot)), number = told & ~kLastShares;
    ends = told & kLastShares;
    if (ring.slot % 2 == kWho || (kWho == 0 && adds_alone(p))) {
      const int64_t block = number % static_cast<uint32_t>(p.query_blocks);
      add_on_turn<C>(p, smem, number, p.turns[block * p.turns_per_block + lds_int(smem.unit_turns(unit_slot))], ring.slot);
    }
    ring.advance();
  } while (!ends);
}

// One lane, the second that adds.
template <typename C>
__device__ void add_dq(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kTurnSlots> ring;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    if (unit.z > 0 && !adds_alone(p)) add_every_second<C, 1>(p, smem, turns.unit_slot(), ring);
    mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
}

// The same in no order, where steps are wide: each warpgroup's share when it is there. `phase`: of the shares. Where units are listed, all
// of them have been added at the end, and nothing that comes behind can overtake that (docs/notes/ffa_backward_turns.md).
template <typename C>
__device__ __forceinline__ void add_shares(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t& phase) {
  uint32_t number;
#pragma unroll 1
  do {
#pragma unroll 1
    for (uint32_t share = 0; share < C::kShares; ++share) {
      mbar_wait(smem.dq_full(share), phase);
      number = lds_int(smem.dq_number(share));
      add_bulk_float(p.dq_sum + static_cast<uint64_t>(number & ~kLastShares) * dq_block_floats(C::kQueries),
                     smem.dq() + share * C::kDqBytes, C::kDqBytes);
      store_commit();
    }
    phase ^= 1;
    store_wait_read();
    mbar_arrive(smem.dq_empty(0));
    mbar_arrive(smem.dq_empty(1));
  } while (!(number & kLastShares));
  if constexpr (C::kListed) {
    store_wait_all();
    fence_proxies();
    __threadfence();
  }
}

// One lane. Copies K and V of each unit, and adds the dq of each step where that leaves by way of shared memory.
template <typename C>
__device__ void copy_keys_add_dq(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kTurnSlots> ring;
  uint32_t dq_phase = 0;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    mbar_wait(smem.kv_empty(), turns.kv_phase() ^ 1);
    if (unit.z == 0) {
      mbar_arrive(smem.kv_raw());  // nothing to load, but dk and dv are staged there
    } else if constexpr (C::kAdders == 2) {
      load_keys<C>(p, smem, smem.unit(turns.unit_slot()));
      add_every_second<C, 0>(p, smem, turns.unit_slot(), ring);
    } else if constexpr (C::kOrdered) {
      add_dq_in_turns<C>(p, smem, turns, ring);
    } else {
      load_keys<C>(p, smem, smem.unit(turns.unit_slot()));
      if constexpr (C::kWide) add_shares<C>(p, smem, dq_phase);
    }
    if constexpr (C::kOrdered) mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
  if constexpr (!C::kDirectDq) store_wait_all();
}

}  // namespace magi
