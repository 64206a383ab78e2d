// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the backward of index attention. Constants only; shared
// by host and device.
#pragma once

#include <cstdint>

namespace magi {

template <typename T_, int kD_, int kRows_>
struct IndexBwdConfig {
  using T = T_;
  static constexpr int kD = kD_;        // head dims, padded to 64
  static constexpr int kRows = kRows_;  // query heads of a list: 64 or 128 columns of the scores
  static constexpr int kBlockN = 128;   // keys of a block: 64 rows for each consumer warpgroup
  static constexpr int kStages = 2;     // of K and of V
  static constexpr int kCtas = 1;       // on a multiprocessor
  static constexpr int kProducers = 128;
  static constexpr int kConsumers = 256;
  static constexpr int kThreads = kProducers + kConsumers;
  static constexpr int kConsumerWarps = kConsumers / 32;
  static constexpr int kConsumerRegisters = 232;  // of the 168 that the launch bound gives out
  static constexpr int kProducerRegisters = 40;
  // dq of a warpgroup: its 64 heads, or half of the columns of the 64 that there are.
  static constexpr int kDqColumns = kRows == 128 ? kD : kD / 2;

  static constexpr uint32_t kQBytes = kRows * kD * 2;    // of dout, too
  static constexpr uint32_t kKBytes = kBlockN * kD * 2;  // of V, too
  static constexpr uint32_t kDsBytes = kBlockN * kRows * 2;
  // Offsets from the 1024-byte aligned start. dq is staged over the rows of Q.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kDoutAt = kQAt + kQBytes;
  static constexpr uint32_t kKAt = kDoutAt + kQBytes;
  static constexpr uint32_t kVAt = kKAt + kStages * kKBytes;
  static constexpr uint32_t kDsAt = kVAt + kStages * kKBytes;
  static constexpr uint32_t kLseAt = kDsAt + kDsBytes;  // base 2, of each head
  static constexpr uint32_t kDeltaAt = kLseAt + kRows * 4;
  static constexpr uint32_t kBarriersAt = kDeltaAt + kRows * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 128;  // 10 barriers
};

}  // namespace magi
