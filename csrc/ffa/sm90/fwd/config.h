// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward kernel. Constants only; shared by host and
// device.
#pragma once

#include <cstdint>

namespace magi {

constexpr uint32_t kSegmentHeader = 128;  // bytes of magi_tile_segment

constexpr uint32_t fwd_segment_bytes(int tile_tokens) {
  return kSegmentHeader + ((static_cast<uint32_t>(tile_tokens) * 8 + 15) & ~15u);
}

// Consumer warpgroups, of 64 rows each: as many as the registers of a thread allow, which hold its
// rows of the output, of the scores and of P.
constexpr int fwd_groups(int head_dim_v) { return head_dim_v <= 128 ? 3 : 2; }
// Those of a second, smaller tile, for calls with few work tiles; 0 where there is none.
constexpr int fwd_few_groups(int head_dim, int head_dim_v) {
  return head_dim == 128 && head_dim_v == 128 ? 2 : 0;
}

// Keys of a block: as many as those registers hold without spills. What else a kernel can do takes
// registers, too.
constexpr int fwd_keys(int head_dim_v, bool plain, bool dropout, int groups) {
  if (groups < fwd_groups(head_dim_v)) return dropout ? 96 : 128;
  if (head_dim_v > 192) return dropout ? 64 : 80;
  if (head_dim_v > 128) return 96;
  if (head_dim_v > 96) return dropout ? 64 : 80;
  if (head_dim_v > 64) return plain ? 112 : dropout ? 80 : 96;
  return plain ? 128 : dropout ? 96 : 112;
}

// Keys of a small block, for masks whose key intervals are short: blocks that fill registers leave
// more of themselves unused there.
constexpr int kSmallBlockN = 64;
// What a block costs beside its keys, in keys. Measured: under a full mask, head dim 128 is 1.08
// times as fast with blocks of 80 as with blocks of 64.
constexpr int kBlockCost = 36;

template <typename T_, int kD_, int kDv_, bool kPlain_, bool kDropout_ = false,
          int kGroups_ = fwd_groups(kDv_),
          int kMostKeys = fwd_keys(kDv_, kPlain_, kDropout_, kGroups_), int kPackedSets_ = 1>
struct FwdConfig {
  using T = T_;
  static constexpr int kD = kD_;                 // head dim of q and k, padded to 32
  static constexpr int kDv = kDv_;               // head dim of v and out, padded to 32
  static constexpr int kAtoms = (kD + 63) / 64;  // of 64 columns in shared memory
  static constexpr int kAtomsV = (kDv + 63) / 64;
  // Without what most calls do not use: softcap, sinks, float32 results, joining of earlier ones,
  // cut tiles. Code that never runs costs short calls up to 6%, by its place in the instruction
  // cache.
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kDropout = kDropout_;  // with attention dropout; 5% in calls without it
  static constexpr int kGroups = kGroups_;
  static constexpr int kBlockM = 64 * kGroups;
  static constexpr int kKStages = 2;
  // Sets of registers for P. With two, P never waits for the output of the block before; the stage
  // of V is then released a block later, so one more keeps the copies ahead.
  static constexpr int kPackedSets = kPackedSets_;
  static constexpr int kVStages = 1 + kPackedSets;
  static constexpr int kQStages = kD <= 128 ? 2 : 1;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kConsumerWarps = 4 * kGroups;
  // Who reads a work tile: the consumer warps, the copying lane and the clearing warp.
  static constexpr int kWorkReaders = kConsumerWarps + 2;
  // The launch bounds give out 128 each with three groups, 168 with two; a warpgroup can take only
  // what another gave back.
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;

  static constexpr uint32_t kBarrierBytes = 256;  // 26 barriers and two work tiles
  static constexpr uint32_t kSegmentStages = 2;
  // Where shared memory holds fewer keys, it decides.
  static constexpr uint32_t kMostBytes = 227 * 1024;
  static constexpr uint32_t kQBytes = kBlockM * kAtoms * 128;
  static constexpr uint32_t kKeyBytes = (kKStages * kAtoms + kVStages * kAtomsV) * 128;
  static constexpr int kFitting = (kMostBytes - kQStages * kQBytes - kBarrierBytes -
                                   kSegmentStages * fwd_segment_bytes(kBlockM)) /
                                  kKeyBytes;
  static constexpr int kBlockN = kFitting < kMostKeys ? kFitting / 16 * 16 : kMostKeys;
  static constexpr bool kHasSmallBlocks = kBlockN > kSmallBlockN && !kDropout;
  static constexpr int kKvMaps = 0;  // which maps of K and V are those of kBlockN keys
  static constexpr uint32_t kKBytes = kBlockN * kAtoms * 128;
  static constexpr uint32_t kVBytes = kBlockN * kAtomsV * 128;
  // What the barrier indices, the parities and the staging of the output over Q rely on.
  static_assert(kKStages == 2 && kVStages <= 3 && kDv <= kD, "see FwdSmem and Worker");
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kQBytes;
  static constexpr uint32_t kVAt = kKAt + kKStages * kKBytes;
  static constexpr uint32_t kBarriersAt =
      kVAt + kVStages * kVBytes;  // the output is staged over the rows of Q
  static constexpr uint32_t kSegmentsAt = kBarriersAt + kBarrierBytes;
  static constexpr uint32_t smem_bytes(int tile_tokens) {
    return kSegmentsAt + kSegmentStages * fwd_segment_bytes(tile_tokens);
  }
};

// The same with small key blocks.
template <typename C>
struct SmallBlocks
    : FwdConfig<typename C::T, C::kD, C::kDv, C::kPlain, C::kDropout, C::kGroups, kSmallBlockN> {
  static constexpr int kKvMaps = 1;
};

}  // namespace magi
