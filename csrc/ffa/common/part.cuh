// SPDX-License-Identifier: Apache-2.0
// Tiles of the forward that are split along the keys, because there are too few of them to fill the
// GPU, or because some take longer than an SM's share of the whole.
#pragma once

#include <cstdint>

namespace magi {

constexpr int kMaxParts =
    16;  // the last part reads the others' outputs, some 70 KB each at head dim 128
constexpr int kBlocksOfPart = 4;      // key blocks of 128 below which splitting does not pay
constexpr int kMostSplitWork = 8192;  // parts of a launch: offsets of partials are 32 bits

// Which part of a tile a work tile is.
struct Part {
  int32_t index, count;

  __host__ __device__ static Part of_word(int32_t word) { return {word & 0xffff, word >> 16}; }
  __host__ __device__ int32_t word() const { return index | count << 16; }

  // A word that also holds the place of the tile in the order, below 2^11.
  __host__ __device__ static Part of_placed_word(int32_t word) { return {word & 31, word >> 16}; }
  __host__ __device__ static int32_t place_of_word(int32_t word) { return word >> 5 & 0x7ff; }
  __host__ __device__ int32_t placed_word(int32_t place) const { return word() | place << 5; }

  // The piece [lo, hi) of a segment's visit range: whole blocks, counted from the right; empty if
  // the segment is short.
  template <typename C>
  __device__ __forceinline__ int2 piece(int2 visit) const {
    if constexpr (C::kPlain) return visit;
    // 16 bits count the blocks of a segment, so the products fit 32.
    const uint32_t blocks = (visit.y - visit.x + C::kBlockN - 1) / C::kBlockN;
    const int first = blocks * index / count, last = blocks * (index + 1) / count;
    return make_int2(max(visit.x, visit.y - last * C::kBlockN), visit.y - first * C::kBlockN);
  }
};

}  // namespace magi
