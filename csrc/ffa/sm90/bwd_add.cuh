// SPDX-License-Identifier: Apache-2.0
// Adds dq where that leaves by way of shared memory: in order (bwd_turns.cuh) or after whoever comes first, by one lane or two; or, where
// steps are wide, as it comes. The first of these lanes also asks for the keys of each unit.
#pragma once

#include "../common/copy.cuh"
#include "../common/flags.cuh"
#include "bwd_feed.cuh"

namespace magi {

// With MAGI_DQ_FIRST_STORES: in a block's counter, that somebody is about to store and nothing is there yet. Less than any count, so the
// last kernel waits on.
constexpr int kClaimed = -(1 << 30);

// Whether the dq at hand is the first of its block and is to be stored, where whoever comes first does; waits until there is something to
// add to. That takes no longer than a store: who has claimed a block has its dq at hand. `seen`: the counter, at some time.
__device__ __forceinline__ bool claims_first(int32_t* count, int seen) {
  if (seen == 0) {
    seen = swap_if_equal(count, 0, kClaimed);
    if (seen == 0) return true;
  }
  while (seen == kClaimed) seen = load_relaxed(count);
  return false;
}

// Sends the sum of the two warpgroups' shares of a step's dq on its way to block `number` of dq_sum, of all columns of a pass.
template <typename C>
__device__ __forceinline__ void send_dq(const BwdKernelParams& p, uint32_t number, uint32_t staged, bool is_first) {
  float* to = p.dq_sum + number * static_cast<uint64_t>(C::kOut / 64 * dq_block_floats(C::kQueries));
  if (is_first)
    store_bytes(to, staged, C::kGroups * C::kDqBytes);  // so that nothing needs to be cleared
  else
    add_bulk_float(to, staged, C::kGroups * C::kDqBytes);
  store_commit();
}

// The dq of a step, when its turn has come. One lane, beside the next step. `words`: which part
// of dq_sum, in blocks of all columns of a pass, and the turn; `next_words` those of the next step, or 0; `seen` what its counter
// was when last looked at, or -1.
//
// What a complete bulk copy wrote would be seen by the thread that waited for it; it need not have got to the place in L2 where the next
// tile adds. Without a release some additions come before the one that they should follow, and some are lost to the store of the first
// (docs/notes/ffa_backward_turns.md). Who waits needs no acquire: it reads nothing, its addition is made in L2, and is not asked for
// before the count has been seen.
template <typename C>
__device__ __forceinline__ void add_in_turn(const BwdKernelParams& p, uint32_t staged, uint32_t staged_is_free, uint32_t words,
                                            uint32_t next_words, int& seen) {
  int32_t* turns = p.turn_flags;
  bool is_first;
  if (p.first_stores) {
    is_first = claims_first(turns + static_cast<uint32_t>(lds_int(words)), max(seen, 0));
  } else {
    const int turn = lds_int(words + 4);
    if (turn == 0) seen = -1;  // what was seen may be from before this CTA's own visit
    while (seen < turn) seen = load_relaxed(turns + static_cast<uint32_t>(lds_int(words)));
    is_first = seen == 0;
  }
  send_dq<C>(p, lds_int(words), staged, is_first);
  seen = next_words != 0 ? load_relaxed(turns + static_cast<uint32_t>(lds_int(next_words))) : -1;
  store_wait_read();
  mbar_arrive(staged_is_free);
  store_wait_all();
  add_released(turns + static_cast<uint32_t>(lds_int(words)), p.first_stores && is_first ? 1 - kClaimed : 1);
}

// The same where another lane may add the step behind: of the block of dq_sum `number`, when dq is there and its turn has come, which is
// `*turn_at`. `slot` is that of the step among four.
template <typename C>
__device__ __forceinline__ void add_on_turn(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t number, const int32_t* turn_at, uint32_t slot) {
  int32_t* count = p.turn_flags + number;
  const int turn = p.first_stores ? 0 : *turn_at;
  int seen = load_relaxed(count);
  mbar_wait(smem.dq_full(slot % 2), slot / 2);
  while (seen < turn) seen = load_relaxed(count);
  const bool is_first = p.first_stores ? claims_first(count, seen) : seen == 0;
  send_dq<C>(p, number, smem.dq(), is_first);
  store_wait_read();
  mbar_arrive(smem.dq_empty(0));
  store_wait_all();
  add_released(count, p.first_stores && is_first ? 1 - kClaimed : 1);
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
