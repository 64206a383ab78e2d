// SPDX-License-Identifier: Apache-2.0
// Rows of keys or values that lie anywhere, brought to shared memory in the layout that a copy by
// tensor map with 128-byte swizzle leaves: by the threads of a producer warpgroup.
#pragma once

#include "device/async_copy.cuh"
#include "ffa/sm90/index/key_lists.h"

namespace magi {

// kRows rows of kD 16-bit elements, shared out among four warps: warp w brings kRows / 4 that
// follow one another, and so many of its lanes hold their keys.
template <int kRows, int kD>
struct RowGather {
  static constexpr int kChunks = kD / 8;  // of 16 bytes in a row
  static constexpr int kAtOnce = 32 / kChunks;
  static constexpr int kOfWarp = kRows / 4;
  static_assert(32 % kChunks == 0 && kOfWarp <= 32 && kOfWarp % (4 * kAtOnce) == 0, "see load");
  static_assert(4 * kAtOnce % 8 == 0, "the swizzle of a row is that of the row four steps before");

  const KeyList& list;
  const int warp, lane;
  int first = 0;  // place of the block in the list
  int entry;      // of this lane's key of the block; in the next block that is being loaded

  __device__ RowGather(const KeyList& l, int w, int n)
      : list(l), warp(w), lane(n), entry(l.entry(place(0))) {}

  __device__ __forceinline__ int place(int block) const {
    return block + warp * kOfWarp + lane % kOfWarp;
  }
  __device__ __forceinline__ bool is_over() const { return first >= list.count; }
  // This lane's key, and asks for that of the next block.
  __device__ __forceinline__ int next_key() {
    const int key = list.key_of(entry, place(first));
    entry = list.entry(place(first + kRows));
    first += kRows;
    return key;
  }

  // Starts the copies of the rows of the keys that the lanes hold, and of a kv head, to `slot`;
  // zeros for keys of -1, which are the last, and behind the end of a row.
  __device__ __forceinline__ void load(uint32_t slot, const GatheredTensor& t, int kv_head,
                                       int key) const {
    const int chunk = lane % kChunks, row = lane / kChunks;
    const uint32_t exist = __ballot_sync(0xffffffff, key >= 0 && lane < kOfWarp);
    const int rows = chunk < t.chunks ? __popc(exist) - row : 0;
    const uint8_t* from = t.rows + kv_head * t.head_bytes + (chunk < t.chunks ? chunk * 16 : 0);
    const uint32_t units = key >= 0 ? key * t.token_units : 0;
    const uint32_t to = slot + (chunk / 8) * (kRows * 128) + (warp * kOfWarp + row) * 128;
#pragma unroll 1
    for (int done = 0; done < kOfWarp; done += 4 * kAtOnce) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int in_warp = done + step * kAtOnce;
        const uint8_t* src = from + 16ull * __shfl_sync(0xffffffff, units, in_warp + row);
        const uint32_t swizzled = ((chunk ^ (step * kAtOnce + row)) % 8) * 16;
        async_copy_16_or_zero(to + in_warp * 128 + swizzled, src, in_warp < rows);
      }
    }
  }
};

}  // namespace magi
