// SPDX-License-Identifier: Apache-2.0
// Hands out the units of the backward kernel: by a lane of its own, in the order of the plan or as they are listed; or, where dq is
// summed in order (C::kOrdered), by a lane of the warp that clears rows (bwd_clear.cuh).
#pragma once

#include "bwd_plan.cuh"
#include "bwd_smem.cuh"
#include "bwd_split.cuh"
#include "schedule.cuh"

namespace magi {

// In order: how a unit walks its layers, in its fourth word.
__device__ __forceinline__ int ordered_walk(const BwdKernelParams& p, int rank) {
  const int flags = p.order[0], way = static_cast<int>(ordered_way(flags, rank >= p.wave));
  return way << kWayBit | (flags & kByHead ? 1 << kByHeadBit : 0) | ordered_shift(p.order, rank, p.wave) << kShiftBit;
}

// One lane. There are few units and they are long, so the next one is taken as late as possible, when all copies of the one
// before have been issued: the look-ups then travel behind its last steps.
template <typename C>
__device__ void schedule_bwd(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  Turns turns;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < p.num_units; unit = atomicAdd(p.workspace, 1) + gridDim.x) {
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
      tile = tile_of(p, plan.words_order, plan.words_first_order, whole / p.unit_parts, rank);
      walk = static_cast<int>(whole % p.units_per_section >= gridDim.x ? Way::kForwards : Way::kEarly) << kWayBit;
    }
    publish_unit(p, smem, turns, tile, head_unit, layers_of_tile(p.plan, tile), whole % p.unit_parts | split | walk, plan.words_records, C::kLayerBytes / 4);
    mbar_wait(smem.issued(), turns.unit_slot() ^ 1);  // a phase for each unit, and this one has been counted
  }
  publish_end(p, smem, turns);
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

// Where some tiles are split, in turns: the number of a unit if none were, and in the words of one its part and its slot. Parts of a unit
// follow one another.
__device__ __forceinline__ int2 whole_in_turns(const BwdKernelParams& p, int unit) {
  const int in_split = unit - p.first_split, slot = in_split >> p.parts_shift;
  if (in_split < 0) return make_int2(unit, 0);
  if (slot >= p.split_slots) return make_int2(unit - (p.split_slots << p.parts_shift) + p.split_slots, 0);
  return make_int2(p.first_split + slot, (in_split - (slot << p.parts_shift)) | (slot + 1) << kSlotBit);
}

// The next unit in order, with its first two layers, by a lane of the warp that clears rows, when all dq of the one before has been added: a
// unit that is taken but not begun might be the one whose turn that waits for. Units may wait for those before them, so they are taken up in
// order, whichever CTA starts first, and by the order of the plan, which turns follow.
template <typename C>
__device__ __forceinline__ void publish_in_turns(const BwdKernelParams& p, const BwdSmem<C>& smem, Turns staged) {
  const int unit = atomicAdd(p.workspace, 1);
  if (unit >= p.num_units) return publish_none(smem, staged);
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  mbar_wait(smem.unit_empty(staged.unit_slot()), staged.unit_phase() ^ 1);
  // Word by word, as there are few registers.
  const uint32_t at = smem.unit(staged.unit_slot()), turns = smem.unit_turns(staged.unit_slot());
  int rank, head;
  if constexpr (C::kSplit) {
    const int2 whole = whole_in_turns(p, unit);
    unit_coords(p, whole.x, &rank, &head);
    sts_int(at + 4, head);
    sts_int(at + 12, ordered_walk(p, rank) | whole.y);
    sts_int(turns, first_head<C>(p, at) | heads_of_unit<C>(p, whole.y) << 16);  // turns are found by the head
  } else {
    unit_coords(p, unit / p.unit_parts, &rank, &head);
    const int part = unit % p.unit_parts, in_section = head - unit / p.units_per_section * p.heads_per_section;
    sts_int(turns, (p.order[0] & kLaterTurns && unit >= p.units_per_section ? p.units_per_section : 0) + in_section * p.unit_parts + part);
    sts_int(at + 4, head);
    sts_int(at + 12, ordered_walk(p, rank) | part);
  }
  const int tile = p.plan[plan.words_order + rank];
  sts_int(at, tile);
  if constexpr (!C::kSplit) sts_int(turns, lds_int(turns) + tile * p.units_per_tile);
  sts_int(at + 8, layers_of_tile(p.plan, tile).y);
  mbar_arrive(smem.unit_full(staged.unit_slot()));
#pragma unroll 1
  for (int layer = 0; layer < min(lds_int(at + 8), 2); ++layer, staged.next_layer()) stage_layer(p, smem, staged, tile, layer);
}

}  // namespace magi
