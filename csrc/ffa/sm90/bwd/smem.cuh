// SPDX-License-Identifier: Apache-2.0
// Shared memory of the backward kernel: where everything is, the barriers, and what the words of
// work tiles and steps mean.
#pragma once

#include "magi/abi.h"
#include "device/mbarrier.cuh"
#include "device/atomics.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"

namespace magi {

// Whether there are queries that see nothing.
__device__ __forceinline__ bool has_unseen(const BwdKernelParams& p) {
  return load_again(p.plan + offsetof(magi_tile_plan_header, has_unseen) / 4) != 0;
}

template <typename C>
struct BwdSmem {
  // Where dynamic shared memory starts on sm_90 if there is no other: behind what the system
  // reserves. A constant, because an address in a register for the whole kernel is one too many;
  // the kernel checks it.
  static constexpr uint32_t base = 1024;

  __device__ uint32_t k() const { return base + C::kKAt; }
  __device__ uint32_t v() const { return base + C::kVAt; }
  __device__ uint32_t q(uint32_t slot) const { return base + C::kQAt + slot * C::kQBytes; }
  __device__ uint32_t dout(uint32_t slot) const { return base + C::kDoAt + slot * C::kDoBytes; }
  __device__ uint32_t ds(uint32_t slot) const {
    return base + C::kDsAt + slot % C::kDsSlots * C::kDsBytes;
  }
  __device__ uint32_t stats(uint32_t slot) const {
    return base + C::kStatsAt + slot * C::kStatBytes;
  }
  __device__ uint32_t segment(uint32_t slot) const {
    return base + C::kSegmentsAt + slot * C::kSegmentBytes;
  }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t work_full(uint32_t s) const { return bar(0 + s); }
  __device__ uint32_t work_empty(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t segment_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t segment_empty(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t kv_raw() const {
    return bar(8);
  }  // arrived, but perhaps with rows to be cleared
  __device__ uint32_t kv_full() const { return bar(9); }
  __device__ uint32_t kv_empty() const { return bar(10); }
  __device__ uint32_t issued() const {
    return bar(11);
  }  // all copies of a work tile; in order, all additions to dq too
  __device__ uint32_t q_full(uint32_t s) const { return bar(12 + s); }  // with the stats
  __device__ uint32_t q_empty(uint32_t s) const { return bar(12 + C::kStages + s); }
  __device__ uint32_t do_full(uint32_t s) const { return bar(12 + 2 * C::kStages + s); }
  __device__ uint32_t do_empty(uint32_t s) const { return bar(12 + 3 * C::kStages + s); }
  __device__ uint32_t q_raw(uint32_t s) const {
    return bar(12 + 4 * C::kStages + s);
  }  // of Q, stats and dO together
  __device__ uint32_t step_full(uint32_t s) const {
    return bar(12 + 5 * C::kStages + s);
  }  // in order: its four words are there
  // A work tile as four words: tile (-1: no more work), kv head, number of segments, part of the
  // heads and pass.
  __device__ uint32_t work_tile(uint32_t s) const { return base + C::kWorkTilesAt + 16 * s; }
  // A step as four words: number of its head and block, first query, and what each warpgroup needs
  // to know (of one bit more than the segment's stage on, the head).
  __device__ uint32_t step(uint32_t s) const { return base + C::kStepsAt + 16 * s; }

  // For a step whose dq is added in order: number of its part of dq_accum, kLastFragments in the
  // last of a work tile, kDirectFragments.
  __device__ uint32_t dq_queue(uint32_t s) const { return base + C::kDqQueueAt + 4 * s; }
  __device__ uint32_t work_semaphore(uint32_t s) const {
    return base + C::kWorkSemaphoreAt + 4 * s;
  }  // where a work tile's semaphore targets are
  // In its place where a call may have a work list: m_begin and m_end of a work tile, in 16 bits
  // each.
  __device__ uint32_t m_range(uint32_t s) const { return base + C::kWorkSemaphoreAt + 4 * s; }
  // Segments of the work tile that are left, of the lane that copies Q, which has no register for
  // it.
  __device__ uint32_t left() const { return base + C::kLeftAt; }
  // Where the work tile before is counted off, -1 if there is none; of the warp that does.
  __device__ uint32_t through() const { return base + C::kThroughAt; }
  // Whether all rows are known to be prepared; of the lane that copies.
  __device__ uint32_t prepared() const { return base + C::kPreparedAt; }
  // In order, in its place: kDirectStoreBit, or 0, of the block at hand; of the lane that copies Q.
  __device__ uint32_t direct() const { return base + C::kPreparedAt; }
  __device__ uint32_t dq() const { return base + C::kDqAt; }
  // For a share of dq, see kDqFragments; where two lanes add, each has its own that says dq is
  // there.
  __device__ uint32_t dq_full(uint32_t fragment) const { return dq_bar(2 * fragment); }
  __device__ uint32_t dq_empty(uint32_t fragment) const { return dq_bar(1 + 2 * fragment); }
  __device__ uint32_t dq_bar(uint32_t i) const {
    return bar(12 + 5 * C::kStages + C::kDqQueueStages + i);
  }
  // With kHasDsEmpty: dS has been read by both warpgroups. And where wide steps have two shares,
  // which block of dq_accum one is for, and whether it is the last of the work tile.
  __device__ uint32_t ds_empty() const { return dq_bar(2 * C::kFullBarriers); }
  __device__ uint32_t dq_number(uint32_t fragment) const {
    return base + C::kDqQueueAt + 4 * fragment;
  }

  // With `clears` Q, stats and dO are handed over by a whole warp, lane by lane.
  __device__ void init_barriers(bool clears) const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(work_full(s), 1);
      mbar_init(work_empty(s), C::kConsumerWarps + 3 + C::kSemaphored);
      mbar_init(segment_full(s), 1);
      mbar_init(segment_empty(s), C::kConsumerWarps + 2);
    }
    mbar_init(kv_raw(), 1);
    mbar_init(kv_full(), 1);
    mbar_init(kv_empty(), C::kGroups);
    mbar_init(issued(), 1 + C::kSemaphored);
    if constexpr (!C::kDirectDq)
      for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment) {
        mbar_init(dq_full(fragment), C::kConsumerWarps / C::kDqFragments);
        mbar_init(dq_empty(fragment), 1);
      }
    if constexpr (C::kDqStoreLanes == 2) mbar_init(dq_full(1), C::kConsumerWarps);
    if constexpr (C::kHasDsEmpty) mbar_init(ds_empty(), C::kConsumerWarps);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(q_full(s), clears ? 32 : 1);
      mbar_init(q_empty(s), C::kConsumerWarps);
      mbar_init(do_full(s), clears ? 32 : 1);
      mbar_init(do_empty(s), C::kConsumerWarps);
      mbar_init(q_raw(s), 1);
    }
    if constexpr (C::kSemaphored)
      for (uint32_t s = 0; s < C::kDqQueueStages; ++s) mbar_init(step_full(s), 1);
    mbar_init_fence();
  }
};

// Fourth word of a work tile. It has three fields:
// * from bit 0 on, which part of the query heads the work tile has and, with two passes, which
// pass;
//   with kCutBit, which side of a split along the queries;
// * from kDescendingBit on, how it traverses its segments: num_descending of magi_work_tile, or
//   where dq is summed in semaphore order a Traversal and kByHeadBit;
// * from kPartialBit on, its partial, counted from one; 0 for a whole tile.
template <typename C>
struct BwdHeadSplit {
  int32_t heads, pass;
  __device__ static BwdHeadSplit of_word(int32_t word) {
    return {(word & 0xff) / C::kPasses, (word & 0xff) % C::kPasses};
  }
  __device__ int32_t word() const { return heads * C::kPasses + pass; }
};
// Whether a work tile makes dk and dq, or with two passes dv alone.
template <typename C>
__device__ __forceinline__ bool makes_dq(int32_t word) {
  return C::kPasses == 1 || BwdHeadSplit<C>::of_word(word).pass == 0;
}
constexpr int kCutBit = 7, kDescendingBit = 8, kPartialBit = 20;
constexpr int kTraversalBit = 16, kByHeadBit = 18;
constexpr int kShiftBit = 20;  // in order, in place of a partial: see ordered_shift
static_assert(kBlocksApart * kMaxWave < 1 << (31 - kShiftBit),
              "an ordered_shift fits into the word of a work tile");
static_assert(kMaxPartials <= 1 << (31 - kPartialBit),
              "a partial, counted from one, fits into the word of a work tile");
static_assert(2 * kMaxHeadSplits == 1 << kDescendingBit && kTailParts < 1 << kCutBit &&
                  kDescendingBit + MAGI_TRAVERSAL_BITS == kPartialBit,
              "parts, a traversal and a partial have bits of their own");

// What a warpgroup needs to know of a step, in one word: flags, and the stage of the segment.
constexpr int kMasked = 1, kSegmentEnds = 2, kWorkTileEnds = 4, kSegmentStageBit = 3,
              kStepHeadBit = 4;
static_assert(kDirectStoreBit == 32768 << kStepHeadBit, "the flag lies above the head");

// Flags beside the number of the block that a dq fragment belongs to. These are the last fragments
// of the work tile:
constexpr uint32_t kLastFragments = 1u << 31;
// In semaphore order, this is the only contribution to its block. No block number needs the bit: so
// many blocks would be 32 TB of dq.
constexpr uint32_t kDirectFragments = 1u << 30;
static_assert(kWorkTileEnds << 29 == static_cast<int>(kLastFragments) &&
                  kDirectStoreBit << 11 == kDirectFragments,
              "the flags of a step, shifted, are those of its dq fragments");

}  // namespace magi
