// SPDX-License-Identifier: Apache-2.0
// The forward of block lists has the memory map of the dense forward, with two consumer
// warpgroups and steps of 128 keys: tiles and steps then divide the blocks of common masks.
#pragma once

#include "ffa/sm90/fwd/config.h"

namespace magi {

constexpr int kIndexBlocksGroups = 2;

template <typename T, int kD>
using IndexBlocksTile = FwdConfig<T, kD, kD, true, false, kIndexBlocksGroups, 128, 2>;

template <typename T, int kD>
struct IndexBlocksConfig : IndexBlocksTile<T, kD> {
  using Base = IndexBlocksTile<T, kD>;
  static constexpr int kWorkReaders = Base::kConsumerWarps + 1;  // no row has to be cleared
  static constexpr int kCtas = 1;
  static constexpr uint32_t kSmemBytes = Base::smem_bytes(0);
};

// Keys that one copy brings divide a block of keys and a step; a copy begins at a multiple of the
// 8 rows that make a swizzled pattern.
constexpr int kLeastBoxRows = 16;

}  // namespace magi
