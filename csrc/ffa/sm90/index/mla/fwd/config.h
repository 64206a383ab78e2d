// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward of index attention in MLA's form. Constants
// only; shared by host and device.
#pragma once

#include <cstdint>

#include "ffa/sm90/index/mla/head_dims.h"

namespace magi {

template <typename T_>
struct MlaFwdConfig {
  using T = T_;
  static constexpr int kD = kMlaHeadDim;
  static constexpr int kDv = kMlaHeadDimV / 2;  // that a consumer warpgroup accumulates
  static constexpr int kBlockM = 64, kBlockN = 64;
  static constexpr int kStages = 2;
  static constexpr int kCtas = 1;  // on a multiprocessor
  static constexpr int kProducers = 128, kConsumers = 256;
  static constexpr int kThreads = kProducers + kConsumers;
  static constexpr int kGroupWarps = 4;
  // The launch bounds give out 168.
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;

  // Columns come in three parts: values of either warpgroup, and the rest.
  static constexpr int kParts = 3, kTail = 2;
  static constexpr int part_begin(int part) { return part * (kDv / 64); }  // in atoms of 64
  static constexpr int part_end(int part) { return part == kTail ? kD / 64 : part_begin(part + 1); }

  static constexpr uint32_t kAtomBytes = 64 * 128;
  static constexpr uint32_t kTileBytes = 64 * kD * 2;  // of Q and of a block of keys
  // Offsets from the 1024-byte aligned start. The output is staged over Q, and P over the tail of
  // its block.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kTileBytes;
  static constexpr uint32_t kReferencesAt = kKAt + kStages * kTileBytes;
  static constexpr uint32_t kSumsAt = kReferencesAt + 2 * 64 * 4;
  static constexpr uint32_t kBarriersAt = kSumsAt + 2 * 64 * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 192;  // 17 barriers
};

}  // namespace magi
