// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward kernel. Constants only; shared by host and
// device.
#pragma once

#include <cstdint>

namespace magi::portable {

// kSmall: for GPUs whose CTAs have 99 KB of shared memory (sm_86, 89, 120), else 163 KB or more.
// kDropout_: with attention dropout, whose hashes take registers.
template <typename T_, int kD_, int kDv_, bool kSmall, bool kDropout_ = false>
struct FwdConfig {
  using T = T_;
  static constexpr int kD = kD_;         // head dim of q and k, padded to 64
  static constexpr int kDv = kDv_;       // head dim of v and out, padded to 64
  static constexpr bool kPlain = false;  // tiles may be cut along the keys
  static constexpr bool kDropout = kDropout_;
  static constexpr int kGroups = 2;  // row groups of the plan
  static constexpr int kBlockM = 128;
  // With 4 warps two CTAs share an SM: while one waits, the other computes.
  static constexpr int kWarps = kD <= 128 ? 4 : 8;
  static constexpr int kBlockN = kD <= 64    ? (kDropout ? 64 : 128)
                                 : kD <= 128 ? (kSmall || kDropout ? 32 : 64)
                                 : kD <= 192 ? 64
                                             : (kSmall ? 32 : 64);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = kD <= 128 ? 2 : 1;
  static constexpr int kRowsPerWarp = kBlockM / kWarps;
  static constexpr int kAtoms = kRowsPerWarp / 16;  // of 16 rows

  static constexpr uint32_t kQBytes = kBlockM * kD * 2;
  static constexpr uint32_t kKBytes = kBlockN * kD * 2;
  static constexpr uint32_t kVBytes = kBlockN * kDv * 2;
  static_assert(kDv <= kD, "the output is staged over Q");
  // Offsets from the 128-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQBytes;
  static constexpr uint32_t kVAt = kKAt + kKBytes;
  static constexpr uint32_t kWorkAt = kVAt + kVBytes;  // two work tiles of 32 bytes
  static constexpr uint32_t kBlockAt = kWorkAt + 64;   // see fwd/block_iter.cuh
  // Two segment records, whose row intervals are read for masks.
  static constexpr uint32_t kRecordsAt = kBlockAt + 32;
  static constexpr uint32_t record_bytes(int tile_tokens) {
    return 4 * ((32 + 2 * static_cast<uint32_t>(tile_tokens) + 3) / 4 * 4);
  }
  static constexpr uint32_t smem_bytes(int tile_tokens) {
    return kRecordsAt + 2 * record_bytes(tile_tokens);
  }
};

}  // namespace magi::portable
