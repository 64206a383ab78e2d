// SPDX-License-Identifier: Apache-2.0
// Rows of queries that a work tile does not use.
#pragma once

#include <cstdint>

#include "device/shared.cuh"
#include "device/tma.cuh"

namespace magi {

// Zeroes the rows behind the `used` of each 64 of a tile of kRows rows and kD columns, which no
// copy writes: what lies there must be finite, and the same in every run. By kThreads threads.
template <int kRows, int kD, int kThreads>
__device__ __forceinline__ void clear_unused_rows(uint32_t tile, int used, int thread) {
  if (used == 64) return;
  constexpr int kChunks = kD / 8;
  const int unused = 64 - used;
  for (int i = thread; i < kRows / 64 * unused * kChunks; i += kThreads) {
    const int chunk = i % kChunks, row = i / kChunks;
    const int place = row / unused * 64 + used + row % unused;
    sts_int4(tile + (chunk / 8 * kRows + place) * 128 + chunk % 8 * 16, 0, 0, 0, 0);
  }
  fence_async_proxy();
}

}  // namespace magi
