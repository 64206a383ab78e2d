// SPDX-License-Identifier: Apache-2.0
// Rows of keys or values that lie anywhere, brought to shared memory in the layout that a copy by
// tensor map with 128-byte swizzle leaves: by the threads of a producer warpgroup.
#pragma once

#include "ffa/sm90/async_copy.cuh"
#include "ffa/sm90/index/key_lists.h"

namespace magi {

// kRows rows of kD 16-bit elements, shared out among four warps: warp w brings kRows / 4 that
// follow one another, and so many of its lanes hold their keys.
template <int kRows, int kD>
struct RowGather {
  static constexpr int kChunks = kD / 8;  // of 16 bytes in a row
  static constexpr int kAtOnce = 32 / kChunks;
  static constexpr int kOfWarp = kRows / 4;
  static_assert(32 % kChunks == 0 && kOfWarp <= 32 && kOfWarp % kAtOnce == 0, "see load");

  // The key that this lane holds of the block that begins at place `first` of the list; -1 behind
  // its end.
  static __device__ __forceinline__ int key(const KeyList& list, int first, int warp, int lane) {
    return list.key(first + warp * kOfWarp + lane % kOfWarp);
  }

  // Starts the copies of the rows of these keys and of a kv head to `slot`; zeros for keys of -1
  // and behind the end of a row.
  static __device__ __forceinline__ void load(uint32_t slot, const GatheredTensor& t, int kv_head,
                                              int key, int warp, int lane) {
    const uint8_t* from = t.rows + kv_head * t.head_bytes;
    const int chunk = lane % kChunks;
    const uint32_t column = slot + (chunk / 8) * (kRows * 128);
#pragma unroll 4
    for (int step = 0; step < kOfWarp / kAtOnce; ++step) {
      const int in_warp = step * kAtOnce + lane / kChunks;
      const int row_key = __shfl_sync(0xffffffff, key, in_warp);
      const int row = warp * kOfWarp + in_warp;
      const bool take = row_key >= 0 && chunk < t.chunks;
      const uint8_t* src = from + (take ? row_key * t.token_bytes + chunk * 16 : 0);
      async_copy_16_or_zero(column + row * 128 + ((chunk ^ row) % 8) * 16, src, take);
    }
  }
};

}  // namespace magi
