// SPDX-License-Identifier: Apache-2.0
// The forward of block lists has the memory map of the dense forward. With two consumer warpgroups
// a step has 128 keys: tiles and steps then divide the blocks of common masks. A list of 64 rows
// fills one, of which two CTAs share a multiprocessor, with half of the keys in a step.
#pragma once

#include "ffa/sm90/fwd/config.h"

namespace magi {

template <typename T, int kD, int kGroups>
using IndexBlocksTile = FwdConfig<T, kD, kD, true, false, kGroups, 64 * kGroups, 2>;

template <typename T, int kD, int kGroups>
struct IndexBlocksConfig : IndexBlocksTile<T, kD, kGroups> {
  using Base = IndexBlocksTile<T, kD, kGroups>;
  static constexpr int kWorkReaders = Base::kConsumerWarps + 1;  // no row has to be cleared
  static constexpr int kCtas = kGroups == 1 ? 2 : 1;
  // The launch bounds give out 128 each with one group, 168 with two.
  static constexpr int kConsumerRegisters = kGroups == 1 ? 216 : 232;
  static constexpr uint32_t kSmemBytes = Base::smem_bytes(0);
};

// Keys that one copy brings divide a block of keys and a step; a copy begins at a multiple of the
// 8 rows that make a swizzled pattern.
constexpr int kLeastBoxRows = 16;

}  // namespace magi
