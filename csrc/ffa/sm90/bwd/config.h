// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the backward kernel. Constants only; shared by host and
// device.
#pragma once

#include <cstdint>

#include "magi/schedule.h"
#include "planner/schedule/heuristics_h100.h"

namespace magi {

constexpr int kTileBlockN = 128;  // of a tile: 64 for each consumer warpgroup
constexpr int kBlockM64 = 64;     // queries
constexpr int kBlockM80 = 80;     // where that rounds to little more (planner/schedule/splits.cpp)
constexpr int kBlockM128 = 128;   // likewise, for head dims up to 64

template <typename T_, int kD_, int kDv_, bool kIsGeneral_ = false, bool kSemaphored_ = false,
          int kBlockM_ = kBlockM64, int kPasses_ = 1>
struct BwdConfig {
  using T = T_;
  // Head dims of q and k, and of v and out, padded to 64, 96, 128, 192 or 256; and the blocks of 64
  // columns in which they lie in shared memory, and dq in dq_accum.
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr int kAtoms = (kD + 63) / 64, kAtomsV = (kDv + 63) / 64;
  // Head dims that have blocks of 80, splits and work lists.
  static constexpr bool kIsMedium = kD > 64 && kD <= 128;
  template <bool kIsGeneral2, bool kSemaphored2>
  using With = BwdConfig<T_, kD_, kDv_, kIsGeneral2, kSemaphored2, kBlockM_, kPasses_>;
  // With what few calls use, told at run time: softcap and dropout. Only with semaphores: at head
  // dim 128 atomics were 8% to 17% slower there, at 64 and 192 up to 6% faster.
  static constexpr bool kIsGeneral = kIsGeneral_;
  // dq is summed in an order that does not depend on time, or after a first one that stores: see
  // bwd/schedule/semaphore_targets.cuh.
  static constexpr bool kSemaphored = kSemaphored_;
  // Where a block of queries has a single contribution, its dq may be rounded and written at once.
  static constexpr bool kDirectStore = kSemaphored && !kIsGeneral;
  // Registers hold dk and dv of a work tile up to 320 columns together. Above that a tile is two
  // work tiles: pass 0 makes dk and dq, pass 1 makes dv.
  static constexpr int kPasses = kPasses_;
  // Other calls of these head dims take one pass.
  static constexpr bool kIsForGeneral = kPasses > 1 && kD + kDv <= 320;
  // dk and dv leave so few registers that P is not kept in float32.
  static constexpr bool kIsTight = kPasses == 1 && kD + kDv > 256;
  static constexpr int kGroups = 2;  // consumer warpgroups of 64 keys each
  static constexpr int kBlockN = kTileBlockN;
  static constexpr int kBlockM = kBlockM_;  // of a step: kBlockM64, kBlockM80 or kBlockM128
  // Kernels over rows, dq_accum, and offsets and deltas have blocks of so many queries.
  static constexpr int kRowBlockM = kBlockM == kBlockM128 ? kBlockM64 : kBlockM;
  // Wide steps hand dq over to be added by bulk copies, as steps in order do; others add it
  // straight from the registers.
  static constexpr bool kIsWide = kBlockM != kBlockM64;
  // Work tiles may be split: see bwd/schedule/split.cuh.
  static constexpr bool kSplit = kIsMedium && !kIsGeneral && (!kSemaphored || kIsWide);
  // The host may have listed work tiles: see magi/schedule.h.
  static constexpr bool kWorkList = kSplit && !kSemaphored;
  static constexpr bool kDirectDq = !kSemaphored && !kIsWide;
  // Where dq leaves by way of shared memory, head dims above 128 have room for it only where dS
  // was.
  static constexpr bool kDqOverDs = kSemaphored && kD > 128;
  static constexpr int kDqFragments =
      kDirectDq ? 0
      : kSemaphored && !kDqOverDs
          ? 1
          : 2;  // in which it is handed over: of both warpgroups, or of each
  // dq of a step is shared out by queries where these are enough for two products of 64 rows, else
  // by columns. In blocks of 80 it is transposed, and columns are the rows of a product.
  static constexpr bool kSharesQueries = kBlockM == kBlockM128;
  static constexpr bool kIsTransposed = kBlockM == kBlockM80;
  static constexpr int kDqQueries = kSharesQueries ? kBlockM / kGroups : kBlockM;
  static constexpr int kDqColumns =
      kSharesQueries ? kD : (kIsTransposed ? 64 * kAtoms : kD) / kGroups;
  static constexpr int kDqValues = kDqQueries * kDqColumns / 128;  // of a thread
  static constexpr int kStages = kIsWide || kD == 192 ? 2
                                 : kD > 128           ? 1
                                 : kSemaphored        ? 2
                                                      : 3;  // of Q and dO
  // Lanes that add dq in semaphore order. One addition takes longer than a step, so two lanes take
  // every second step each; above head dim 128 steps are longer and one lane keeps up. The lanes
  // still need a step's words when its stage of Q is refilled, so these have a ring of their own.
  static constexpr int kDqStoreLanes = kSemaphored && kD <= 128 ? 2 : 1;
  static constexpr int kDqQueueStages =
      kSemaphored ? 2 * kStages
                  : kStages;  // unused without semaphores; it keeps the offsets that were timed
  // Barriers that say dq is there: one for each fragment, or for every second step.
  static constexpr int kFullBarriers = kDqStoreLanes == 2 ? 2 : kDqFragments;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kConsumerRegisters = kSemaphored && kD == 64 ? 232 : 240;
  static constexpr int kProducerRegisters = kSemaphored && kD == 64 ? 40 : 24;

  static constexpr uint32_t kKBytes = kBlockN * kAtoms * 128, kVBytes = kBlockN * kAtomsV * 128;
  static constexpr uint32_t kQBytes = kBlockM * kAtoms * 128;    // of a stage
  static constexpr uint32_t kDoBytes = kBlockM * kAtomsV * 128;  // of a stage
  static constexpr uint32_t kStatBytes = kBlockM * 8;            // offsets, then deltas
  static constexpr uint32_t kDsBytes = kBlockM * kBlockN * 2;
  static constexpr int kDsSlots = kIsWide || (kD == 192 && kDv == 192) ? 1 : 2;
  static constexpr uint32_t kDqBytes = kDqQueries * kDqColumns * 4;  // of one warpgroup
  static constexpr uint32_t kDsRoom =
      kDqOverDs && kDqBytes > kDsSlots* kDsBytes ? kDqBytes : kDsSlots * kDsBytes;
  // dS has a barrier of its own that says both warpgroups have read it.
  static constexpr bool kHasDsEmpty = kDsSlots == 1 && !kDqOverDs;
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kKAt = 0;
  static constexpr uint32_t kVAt = kKAt + kKBytes;
  static constexpr uint32_t kQAt = kVAt + kVBytes;
  static constexpr uint32_t kDoAt = kQAt + kStages * kQBytes;
  static constexpr uint32_t kDsAt = kDoAt + kStages * kDoBytes;
  static constexpr uint32_t kDqAt = kDqOverDs ? kDsAt : kDsAt + kDsRoom;  // one for each warpgroup
  static constexpr uint32_t kStatsAt =
      kDsAt + kDsRoom + (!kDirectDq && !kDqOverDs ? kGroups * kDqBytes : 0);
  static constexpr uint32_t kBarriersAt = kStatsAt + kStages * kStatBytes;
  static constexpr int kBarriers =
      12 + 5 * kStages + kDqQueueStages + 2 * kFullBarriers + kHasDsEmpty;
  // A word for each place, or for each of two shares.
  static constexpr uint32_t kDqQueueAt = kBarriersAt + 8 * kBarriers;
  static constexpr uint32_t kDqQueueBytes = kSemaphored         ? 4 * kDqQueueStages
                                            : kDqFragments == 2 ? 8
                                                                : 0;
  static constexpr uint32_t kWorkTilesAt =
      (kDqQueueAt + kDqQueueBytes + 15) / 16 * 16;         // two, of 16 bytes each
  static constexpr uint32_t kStepsAt = kWorkTilesAt + 32;  // one for each stage, likewise
  static constexpr uint32_t kWorkSemaphoreAt = kStepsAt + 16 * kStages;
  static constexpr uint32_t kLeftAt = kWorkSemaphoreAt + (kSemaphored || kWorkList ? 8 : 0);
  static constexpr uint32_t kThroughAt = kLeftAt + 4;  // with a work list
  static constexpr uint32_t kPreparedAt = kThroughAt + (kWorkList ? 4 : 0);
  static constexpr uint32_t kSegmentsAt = (kPreparedAt + 4 + 15) / 16 * 16;
  static constexpr uint32_t kSegmentHeader = 128;  // bytes of magi_tile_segment
  static constexpr uint32_t kSegmentBytes = kSegmentHeader + kBlockN * 8;
  static constexpr uint32_t kSmemBytes = kSegmentsAt + 2 * kSegmentBytes;
  static_assert(!kIsWide || (kIsMedium && !kIsGeneral && kBlockM == kBlockM80) ||
                    (kD == 64 && kDv == 64 && !kIsGeneral && !kSemaphored),
                "nowhere else are there registers for wide blocks");
  // Where the offset of a row is among the offsets and deltas of a step, in bytes; its delta is
  // kDeltasAt behind.
  static constexpr uint32_t stat_at(int row) {
    return row / kRowBlockM * (8 * kRowBlockM) + row % kRowBlockM * 4;
  }
  static constexpr uint32_t kDeltasAt = 4 * kRowBlockM;
  static_assert(kPasses == 2 || (kD + kDv <= 320 && !(kIsTight && kIsGeneral)),
                "more of dk and dv than registers hold");
  static_assert(kSmemBytes <= 227 * 1024, "more shared memory than a multiprocessor gives one CTA");
};

// The layout of dq_accum, in float32: blocks of queries x 64 columns of one head, each in the order
// in which an accumulator lies in the registers of a warpgroup, so that whole lines are added.
constexpr int dq_block_floats(int queries) { return queries * 64; }
constexpr int kMaxWave = 256;    // tiles, see bwd/schedule/semaphore_targets.cuh
constexpr int kMaxTimed = 1024;  // tiles
constexpr int kTicks = 32;       // of expected time: one block
// In deterministic order all work tiles descend if they have at most so many query heads, and
// kManyTiles for each of these are in work at the same time.
constexpr int kFewHeads = 4;
constexpr int kListedHeadSplits = MAGI_LIST_SPLITS;  // of a work list's tile, split by heads
constexpr int kMaxHeadSplits = 128;                  // of the query heads of a tile
constexpr int kTailParts =
    8;  // at most, of a work tile of the last wave, or that the caller splits
constexpr int kMaxPartials =
    2048;  // more than there are work tiles whose parts leave dk and dv in the workspace
constexpr int kMaxWorkList = 512;  // tiles of kv heads
constexpr int kBwdCounters = 32;   // int32 words at the start of the workspace
// Among these: entries that the last kernel has taken up (with a work list, and in deterministic
// order); and with a work list how many groups of warps of the kernel that prepares the rows are
// through (bwd/rows/preprocess_work_list.cuh).
constexpr int kPlaceWord = 2, kPreparedWord = 3;
// Where contributions are counted, the caller keeps what is made of the plan ahead of the main
// kernel, up to so many bytes. In calls that need more, making it takes a hundredth of the time.
constexpr int64_t kMostKeptOrder = 4 << 20;
constexpr int kRowThreads = 256;
// In the words of a step, with semaphores: the step is the only contribution to its block, so dq is
// rounded and written at once. The flag lies above the head.
constexpr int kDirectStoreBit = 1 << 19;
constexpr int stat_floats(int queries) {
  return 2 * queries;
}  // of a block and head: offsets of the exponents, then deltas

}  // namespace magi
