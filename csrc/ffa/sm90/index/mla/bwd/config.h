// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the backward of index attention in MLA's form. Constants
// only; shared by host and device.
#pragma once

#include <cstdint>

#include "ffa/sm90/index/mla/head_dims.h"

namespace magi {

template <typename T_>
struct MlaBwdConfig {
  using T = T_;
  static constexpr int kD = kMlaHeadDim, kDv = kMlaHeadDimV;
  static constexpr int kRows = 64, kBlockN = 64;
  static constexpr int kCtas = 1;  // on a multiprocessor
  static constexpr int kProducers = 128, kConsumers = 256;
  static constexpr int kThreads = kProducers + kConsumers;
  static constexpr int kGroupWarps = 4;
  // The launch bounds give out 168.
  static constexpr int kProducerRegisters = 56;
  static constexpr int consumer_registers(int group) { return group == 0 ? 208 : 240; }

  // Columns come in atoms of 64. A warpgroup has the dq, and adds the dk, of four; the second one
  // also those of the last atom, which are no values.
  static constexpr int kAtoms = kD / 64, kValueAtoms = kDv / 64, kOwnAtoms = kValueAtoms / 2;
  static constexpr int kWideColumns = 64 * kOwnAtoms;
  static constexpr int end_atom(int group) { return group == 0 ? kOwnAtoms : kAtoms; }
  // Keys come in three parts; the last are no values. Part p is read last by warpgroup p > 0.
  static constexpr int kParts = 3;
  static constexpr int part_begin(int part) { return part * kOwnAtoms; }
  static constexpr int part_end(int part) {
    return part == kParts - 1 ? kAtoms : part_begin(part + 1);
  }

  static constexpr uint32_t kAtomBytes = 64 * 128;
  // Offsets from the 1024-byte aligned start. dq is staged over Q.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kDoutAt = kQAt + kAtoms * kAtomBytes;
  static constexpr uint32_t kKAt = kDoutAt + kValueAtoms * kAtomBytes;
  static constexpr uint32_t kPAt = kKAt + kAtoms * kAtomBytes;
  static constexpr uint32_t kDsAt = kPAt + kAtomBytes;
  static constexpr uint32_t kLseAt = kDsAt + kAtomBytes;  // base 2, of each row
  static constexpr uint32_t kDeltaAt = kLseAt + kRows * 4;
  static constexpr uint32_t kBarriersAt = kDeltaAt + kRows * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 128;  // 14 barriers
};

}  // namespace magi
