// SPDX-License-Identifier: Apache-2.0
// Adds dq where that leaves by way of shared memory: in order, by one lane or two; or, where steps are wide, as it comes. The first of these
// lanes also asks for the keys of each unit.
#pragma once

#include "bwd_feed.cuh"
#include "bwd_turns.cuh"

namespace magi {

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
    if (!p.first_stores) turn = p.turns[static_cast<int64_t>(block_of<C::kQueries>(step.y)) * p.turns_per_block + unit_at];
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
__device__ __forceinline__ bool adds_alone(const BwdKernelParams& p) { return !p.first_stores && !(p.order[0] & (kTimed | kInWaves)); }

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
      add_on_turn<C>(p, smem, number, p.turns + block * p.turns_per_block + lds_int(smem.unit_turns(unit_slot)), ring.slot);
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
