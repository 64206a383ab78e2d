// SPDX-License-Identifier: Apache-2.0
// Rounds dq out of the order of an accumulator into rows in shared memory: in the last kernel of
// the backward, and in the main one where a only contribution is all that a block gets.
#pragma once

#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/config.h"

namespace magi {

// What a thread of a warpgroup holds of a block of dq: chunks of four values, two pairs each, as
// the accumulator of the main kernel has them. Its rows are queries, or columns in wide blocks.
template <int kBlockM>
struct DqChunk {
  static constexpr bool kIsTransposed = kBlockM != kBlockM64;
  static constexpr int kCount = kBlockM / 8;
  // Place of the first value of pair r of chunk i.
  static __device__ __forceinline__ int2 query_and_column(int thread, int i, int r) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * r, column = 8 * i + thread % 4 * 2;
    return kIsTransposed ? make_int2(column, row) : make_int2(row, column);
  }
};

// Rounded, to rows of 128 bytes in shared memory, by a thread of a warpgroup that has chunks `x(0)`
// to before `x(kChunks)` as float4. In narrow blocks these are 8 columns each, from 8 `first` on.
template <typename T, int kBlockM, int kChunks, typename Chunks>
__device__ __forceinline__ void stage_dq(uint32_t tile, Chunks x, float factor, int thread,
                                         int first = 0) {
  const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < kChunks; i += 2) {
    // Lane 8m + l addresses row l of matrix m: (accumulator's rows 0-7, rows 8-15) x (columns 0-7,
    // columns 8-15).
    const int across = (matrix & 1) * 8, along = i + (matrix >> 1);
    const int query =
        DqChunk<kBlockM>::kIsTransposed ? 8 * along + lane % 8 : warp * 16 + across + lane % 8;
    const int chunk = DqChunk<kBlockM>::kIsTransposed ? 2 * warp + across / 8 : first + along;
    const uint32_t at = tile + query * 128 + ((chunk ^ (query & 7)) << 4);
    const float4 even = x(i), odd = x(i + 1);
    const uint32_t values[4] = {pack_pair<T>(even.x * factor, even.y * factor),
                                pack_pair<T>(even.z * factor, even.w * factor),
                                pack_pair<T>(odd.x * factor, odd.y * factor),
                                pack_pair<T>(odd.z * factor, odd.w * factor)};
    if constexpr (DqChunk<kBlockM>::kIsTransposed)
      store_matrix_transposed_x4(at, values[0], values[1], values[2], values[3]);
    else
      store_matrix_x4(at, values[0], values[1], values[2], values[3]);
  }
}

}  // namespace magi
