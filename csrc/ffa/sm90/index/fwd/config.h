// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward of index attention. Constants only; shared by
// host and device.
#pragma once

#include <cstdint>

namespace magi {

template <typename T_, int kD_, int kGroups_>
struct IndexFwdConfig {
  using T = T_;
  static constexpr int kD = kD_;  // head dim of q and k, padded to 64
  static constexpr int kDv = kD_;
  // Consumer warpgroups of 64 query heads each. With one, two CTAs share a multiprocessor.
  static constexpr int kGroups = kGroups_;
  static constexpr int kCtas = kGroups == 1 ? 2 : 1;
  static constexpr int kBlockM = 64 * kGroups;
  static constexpr int kBlockN = kGroups == 1 ? 64 : 128;
  static constexpr int kQStages = 2, kKStages = 2;
  static constexpr int kVStages = 3;  // one is released half a block later than one of K
  static constexpr int kProducers = 128;
  static constexpr int kThreads = kProducers + 128 * kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups;
  // The launch bounds give out 168 and 128.
  static constexpr int kConsumerRegisters = kGroups == 1 ? 168 : 224;
  static constexpr int kProducerRegisters = kGroups == 1 ? 88 : 56;

  static constexpr uint32_t kQBytes = kBlockM * kD * 2;
  static constexpr uint32_t kKBytes = kBlockN * kD * 2;
  static constexpr uint32_t kVBytes = kBlockN * kDv * 2;
  // Offsets from the 1024-byte aligned start. The output is staged over the rows of Q.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kQBytes;
  static constexpr uint32_t kVAt = kKAt + kKStages * kKBytes;
  static constexpr uint32_t kBarriersAt = kVAt + kVStages * kVBytes;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 128;  // 14 barriers
};

}  // namespace magi
