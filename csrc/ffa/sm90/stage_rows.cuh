// SPDX-License-Identifier: Apache-2.0
// Accumulators to 16-bit rows in shared memory, in the layout of a tensor map with 128-byte
// swizzle.
#pragma once

#include "ffa/common/scores.cuh"
#include "device/tma.cuh"

namespace magi {

// The 64 rows of a warpgroup, each times its weight, in tiles of 64 columns and kRows rows.
template <typename T, int kColumns, int kRows>
__device__ __forceinline__ void stage_rows(uint32_t smem, const float (&o)[kColumns / 2],
                                           const float (&weight)[2], int warp, int lane) {
  // Lane 8i + l addresses row l of matrix i: (rows 0-7, rows 8-15) x (chunk, chunk + 1) of 8
  // columns.
  const int matrix = lane / 8;
  const int row = 16 * warp + (matrix & 1) * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const int chunk = j % 8 + (matrix >> 1);
    const uint32_t at = smem + (j / 8) * (kRows * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
    store_matrix_x4(at, pack_pair<T>(o[4 * j] * weight[0], o[4 * j + 1] * weight[0]),
                    pack_pair<T>(o[4 * j + 2] * weight[1], o[4 * j + 3] * weight[1]),
                    pack_pair<T>(o[4 * j + 4] * weight[0], o[4 * j + 5] * weight[0]),
                    pack_pair<T>(o[4 * j + 6] * weight[1], o[4 * j + 7] * weight[1]));
  }
}

}  // namespace magi
