// SPDX-License-Identifier: Apache-2.0
// Adds dq where that leaves by way of shared memory: in order (bwd_turns.cuh) or after whoever comes first, by two lanes or one; or, where
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

// The dq of a step, when it is there and its turn has come, which is `*turn_at`: one lane, while another may add the step behind. `number`
// says which block of dq_sum, of all columns of a pass; `slot` is its place among those of what the lanes are told.
//
// What a complete bulk copy wrote would be seen by the thread that waited for it; it need not have got to the place in L2 where the next
// tile adds. Without a release some additions come before the one that they should follow, and some are lost to the store of the first
// (docs/notes/ffa_backward_turns.md). Who waits needs no acquire: it reads nothing, its addition is made in L2, and is not asked for
// before the count has been seen.
template <typename C>
__device__ __forceinline__ void add_on_turn(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t number, const int32_t* turn_at, uint32_t slot) {
  int32_t* count = p.turn_flags + number;
  const int turn = p.first_stores ? 0 : *turn_at;
  int seen = load_relaxed(count);
  mbar_wait(smem.dq_full(slot % C::kAdders), slot / C::kAdders);
  while (seen < turn) seen = load_relaxed(count);
  const bool is_first = p.first_stores ? claims_first(count, seen) : seen == 0;
  send_dq<C>(p, number, smem.dq(), is_first);
  store_wait_read();
  mbar_arrive(smem.dq_empty(0));
  store_wait_all();
  add_released(count, p.first_stores && is_first ? 1 - kClaimed : 1);
}

// Writes the dq of a step that is the sole visit of its block, rounded rows of all columns of a pass; rows and columns that do not exist are
// left out. Nobody waits for it but the end of the kernel.
template <typename C>
__device__ __forceinline__ void write_sole(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t number, uint32_t slot) {
  const uint32_t of_head = number / C::kPasses, head = of_head / static_cast<uint32_t>(p.query_blocks);
  const int column = number % C::kPasses * C::kOut, query = (of_head - head * p.query_blocks) * C::kQueries;
  mbar_wait(smem.dq_full(slot % C::kAdders), slot / C::kAdders);
#pragma unroll
  for (int d = 0; d < C::kOut / 64; ++d) store_tile_3d(&p.dq_map, smem.dq() + d * (C::kQueries * 128), column + d * 64, query, head);
  store_commit();
  store_wait_read();
  mbar_arrive(smem.dq_empty(0));
}

// Whether one lane adds all steps: also where a tile visits a block in several layers, as all its visits have the same turn, and come one
// after the other only if one lane adds them.
template <typename C>
__device__ __forceinline__ bool adds_alone(const BwdKernelParams& p) {
  return C::kAdders == 1 || (!p.first_stores && !(p.order[0] & (kTimed | kInWaves)));
}

// Adds dq of the steps of a unit, by two lanes each of which takes every second one, counted from the start of the CTA, `kWho` 0 or 1 being
// the number of the first; or by one. To add takes a lane longer than a step takes the warpgroups, mostly until it is complete and passed
// on. Each looks at all steps, to know which is the last of the unit. What is told of a step stays until four steps later (two, of one
// lane): that one is told when Q of the third after it (the first) has been used, and before that dq of the one before has been taken up.
template <typename C, int kWho>
__device__ __forceinline__ void add_every_second(const BwdKernelParams& p, const BwdSmem<C>& smem, uint32_t unit_slot, Ring<C::kToldSlots>& ring) {
  bool ends;
#pragma unroll 1
  do {
    mbar_wait(smem.step_full(ring.slot), ring.phase);
    const uint32_t told = lds_int(smem.told(ring.slot)), number = told & ~(C::kSole ? kLastShares | kSoleShares : kLastShares);
    ends = told & kLastShares;
    const bool is_mine = ring.slot % 2 == kWho || (kWho == 0 && adds_alone<C>(p));
    if (C::kSole && is_mine && told & kSoleShares) {
      write_sole<C>(p, smem, number, ring.slot);
    } else if (is_mine) {
      const int64_t block = number / C::kPasses % static_cast<uint32_t>(p.query_blocks);
      const int32_t* turn_at = p.turns + block * p.turns_per_block;
      if constexpr (C::kSplit)  // that of its part of the heads
        turn_at += lds_int(smem.unit(unit_slot)) * p.units_per_tile + (number / static_cast<uint32_t>(p.query_blocks) >> p.heads_shift);
      else
        turn_at += lds_int(smem.unit_turns(unit_slot));
      add_on_turn<C>(p, smem, number, turn_at, ring.slot);
    }
    ring.advance();
  } while (!ends);
}

// One lane, the second that adds.
template <typename C>
__device__ void add_dq(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
  Ring<C::kToldSlots> ring;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    if (unit.z > 0 && !adds_alone<C>(p)) add_every_second<C, 1>(p, smem, turns.unit_slot(), ring);
    mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
  if constexpr (C::kSole) store_wait_all();  // of what was written and not added
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
  Ring<C::kToldSlots> ring;
  uint32_t dq_phase = 0;
  while (true) {
    mbar_wait(smem.unit_full(turns.unit_slot()), turns.unit_phase());
    const int4 unit = lds_int4(smem.unit(turns.unit_slot()));
    if (unit.x < 0) break;
    mbar_wait(smem.kv_empty(), turns.kv_phase() ^ 1);
    if (unit.z == 0) {
      mbar_arrive(smem.kv_raw());  // nothing to load, but dk and dv are staged there
    } else {
      load_keys<C>(p, smem, smem.unit(turns.unit_slot()));
      if constexpr (C::kOrdered)
        add_every_second<C, 0>(p, smem, turns.unit_slot(), ring);
      else if constexpr (C::kWide)
        add_shares<C>(p, smem, dq_phase);
    }
    if constexpr (C::kOrdered) mbar_arrive(smem.issued());
    mbar_arrive(smem.unit_empty(turns.unit_slot()));
    turns.next_unit();
  }
  if constexpr (!C::kDirectDq) store_wait_all();
}

}  // namespace magi
