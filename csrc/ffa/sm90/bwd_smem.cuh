// SPDX-License-Identifier: Apache-2.0
// Shared memory of the backward kernel: where everything is, the barriers, and what the words of units and steps mean.
#pragma once

#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/shared.cuh"
#include "bwd_config.h"
#include "bwd_params.h"
#include "bwd_plan.cuh"

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
  __device__ uint32_t ds(uint32_t slot) const { return base + C::kDsAt + slot % C::kDsSlots * C::kDsBytes; }
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
  __device__ uint32_t issued() const { return bar(11); }  // all copies of a unit; in order, all additions to dq too
  __device__ uint32_t q_full(uint32_t s) const { return bar(12 + s); }  // with the stats
  __device__ uint32_t q_empty(uint32_t s) const { return bar(12 + C::kStages + s); }
  __device__ uint32_t do_full(uint32_t s) const { return bar(12 + 2 * C::kStages + s); }
  __device__ uint32_t do_empty(uint32_t s) const { return bar(12 + 3 * C::kStages + s); }
  __device__ uint32_t q_raw(uint32_t s) const { return bar(12 + 4 * C::kStages + s); }  // of Q, stats and dO together
  __device__ uint32_t step_full(uint32_t s) const { return bar(12 + 5 * C::kStages + s); }  // in order: its four words are there
  // A unit as four words: tile (-1: no more work), kv head, number of layers, part of the heads and pass.
  __device__ uint32_t unit(uint32_t s) const { return base + C::kUnitsAt + 16 * s; }
  // A step as four words: number of its head and block, first query, and what each warpgroup needs to know (of one bit more
  // than the layer's slot on, the head).
  __device__ uint32_t step(uint32_t s) const { return base + C::kStepsAt + 16 * s; }

  // Of a step whose dq is added in order: number of its part of dq_sum, kLastShares in the last of a unit, kSoleShares.
  __device__ uint32_t told(uint32_t s) const { return base + C::kToldAt + 4 * s; }
  __device__ uint32_t unit_turns(uint32_t s) const { return base + C::kUnitTurnsAt + 4 * s; }  // where a unit's turns are
  // Layers of the unit that are left, of the lane that copies Q, which has no register for it.
  __device__ uint32_t left() const { return base + C::kLeftAt; }
  // Where the unit before is counted off, -1 if there is none; of the warp that does.
  __device__ uint32_t through() const { return base + C::kThroughAt; }
  // Whether all rows are known to be prepared; of the lane that copies.
  __device__ uint32_t prepared() const { return base + C::kPreparedAt; }
  // In order, in its place: kSoleVisit, or 0, of the block at hand; of the lane that copies Q.
  __device__ uint32_t sole() const { return base + C::kPreparedAt; }
  __device__ uint32_t dq() const { return base + C::kDqAt; }
  // Of a share of dq, see kShares; where two lanes add, each has its own that says dq is there.
  __device__ uint32_t dq_full(uint32_t share) const { return bar(12 + 5 * C::kStages + C::kToldSlots + 2 * share); }
  __device__ uint32_t dq_empty(uint32_t share) const { return bar(13 + 5 * C::kStages + C::kToldSlots + 2 * share); }
  // Of wide steps: dS has been read by both warpgroups. And where there are two shares, which block of dq_sum one is for, and whether
  // it is the last of the unit.
  __device__ uint32_t ds_empty() const { return bar(12 + 5 * C::kStages + C::kToldSlots + 2 * C::kFullBarriers); }
  __device__ uint32_t dq_number(uint32_t share) const { return base + C::kToldAt + 4 * share; }

  // With `clears` Q, stats and dO are handed over by a whole warp, lane by lane.
  __device__ void init_barriers(bool clears) const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(unit_full(s), 1);
      mbar_init(unit_empty(s), C::kConsumerWarps + 3 + C::kOrdered);
      mbar_init(layer_full(s), 1);
      mbar_init(layer_empty(s), C::kConsumerWarps + 2);
    }
    mbar_init(kv_raw(), 1);
    mbar_init(kv_full(), 1);
    mbar_init(kv_empty(), C::kGroups);
    mbar_init(issued(), 1 + C::kOrdered);
    if constexpr (!C::kDirectDq)
      for (uint32_t share = 0; share < C::kShares; ++share) {
        mbar_init(dq_full(share), C::kConsumerWarps / C::kShares);
        mbar_init(dq_empty(share), 1);
      }
    if constexpr (C::kAdders == 2) mbar_init(dq_full(1), C::kConsumerWarps);
    if constexpr (C::kWide) mbar_init(ds_empty(), C::kConsumerWarps);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(q_full(s), clears ? 32 : 1);
      mbar_init(q_empty(s), C::kConsumerWarps);
      mbar_init(do_full(s), clears ? 32 : 1);
      mbar_init(do_empty(s), C::kConsumerWarps);
      mbar_init(q_raw(s), 1);
    }
    if constexpr (C::kOrdered)
      for (uint32_t s = 0; s < C::kToldSlots; ++s) mbar_init(step_full(s), 1);
    mbar_init_fence();
  }
};

// Fourth word of a unit: which query heads and which columns, or a cut (bwd_split.cuh); how it walks its layers; and its slot. Where walks
// are told (C::kTold) that is 12 bits, as in magi_walked_unit, in place of a Way.
template <typename C>
struct BwdPart {
  int32_t heads, pass;
  static constexpr int kMask = C::kTold ? kMostHeadParts - 1 : 0xffff;
  __device__ static BwdPart of_word(int32_t word) { return {(word & kMask) / C::kPasses, (word & kMask) % C::kPasses}; }
};
constexpr int kToldBit = 8;
constexpr int kWayBit = 16, kByHeadBit = 18, kCutBit = 19, kSlotBit = 20;
constexpr int kShiftBit = 20;  // in order, in place of a slot: see ordered_shift
static_assert(kBlocksApart * kMaxWave < 1 << (31 - kShiftBit), "a shift in the word of a unit");
static_assert(kMostSplit <= 1 << (31 - kSlotBit), "a slot, counted from one, in the word of a unit");
static_assert(kMostHeadParts == 1 << kToldBit && kToldBit + MAGI_WALK_BITS == kSlotBit, "parts, a walk and a slot in one word");

// What a warpgroup needs to know of a step, in one word: flags, and the slot of the layer.
constexpr int kMasked = 1, kLayerEnds = 2, kUnitEnds = 4, kLayerSlotBit = 3, kStepHeadBit = 4;
static_assert(kSoleVisit == 32768 << kStepHeadBit, "behind the head");

// In the number of the block that a share of dq is for: the unit has no more.
constexpr uint32_t kLastShares = 1u << 31;
// And, where lanes are told in order, that this is the sole visit of its block: as many blocks as that bit counts are 32 TB of dq.
constexpr uint32_t kSoleShares = 1u << 30;
static_assert(kUnitEnds << 29 == static_cast<int>(kLastShares) && kSoleVisit << 11 == kSoleShares, "moved by so many bits");

}  // namespace magi
