// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward kernel. Constants only; shared by host and
// device.
#pragma once

#include <cstdint>

namespace magi {

template <typename T_, int kD_, int kDv_, bool kPlain_, bool kDropout_ = false>
struct FwdConfig {
  using T = T_;
  static constexpr int kD = kD_;    // head dim of q and k, padded to 64
  static constexpr int kDv = kDv_;  // head dim of v and out, padded to 64
  // Without what most calls do not use: softcap, sinks, float32 results, joining of earlier ones,
  // cut tiles. Code that never runs costs short calls up to 6%, by its place in the instruction
  // cache.
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kDropout = kDropout_;  // with attention dropout; 5% in calls without it
  static constexpr int kGroups = 2;            // consumer warpgroups of 64 rows each
  static constexpr int kBlockM = 64 * kGroups;
  // As many keys as shared memory and registers hold: with 192, 112 take too many registers, and
  // with 256 and dropout, 80.
  static constexpr int kBlockN = kD <= 128 || (kD == 192 && kDv <= 128) ? 128
                                 : kD == 192                            ? 96
                                 : kDropout                             ? 64
                                                                        : 80;
  // Sets of registers for P. With one, P waits for the output of the block before; with 256 columns
  // there is no room for two.
  static constexpr int kPackedSets = kDv > 192 ? 1 : 2;
  static constexpr int kKStages = 2;
  // A V stage is released half a block later than a K stage, so one more keeps the copies ahead.
  static constexpr int kVStages = kD <= 128 ? 3 : 2;
  static constexpr int kQStages = kD <= 128 ? 2 : 1;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kConsumerWarps = 4 * kGroups;
  // Who reads a work tile: the consumer warps, the copying lane and the clearing warp.
  static constexpr int kWorkReaders = kConsumerWarps + 2;
  // What the launch bound gives out is 168 each; a warpgroup can take only what another gave back.
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;

  static constexpr uint32_t kQBytes = kBlockM * kD * 2;
  static constexpr uint32_t kKBytes = kBlockN * kD * 2;
  static constexpr uint32_t kVBytes = kBlockN * kDv * 2;
  // What the barrier indices, the parities and the staging of the output over Q rely on.
  static_assert(kKStages == 2 && kVStages <= 3 && kDv <= kD, "see FwdSmem and Worker");
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kQBytes;
  static constexpr uint32_t kVAt = kKAt + kKStages * kKBytes;
  static constexpr uint32_t kBarriersAt =
      kVAt + kVStages * kVBytes;  // the output is staged over the rows of Q
  static constexpr uint32_t kSegmentsAt = kBarriersAt + 256;  // 25 barriers and two work tiles
  static constexpr uint32_t kSegmentStages = 2;
  static constexpr uint32_t kSegmentHeader = 128;  // bytes of magi_tile_segment

  static constexpr uint32_t segment_bytes(int tile_tokens) {
    return kSegmentHeader + ((static_cast<uint32_t>(tile_tokens) * 8 + 15) & ~15u);
  }
  static constexpr uint32_t smem_bytes(int tile_tokens) {
    return kSegmentsAt + kSegmentStages * segment_bytes(tile_tokens);
  }
};

}  // namespace magi
