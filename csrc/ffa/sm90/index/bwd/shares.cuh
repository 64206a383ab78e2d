// SPDX-License-Identifier: Apache-2.0
// What a block of keys gets of one list: rows of an accumulator, added to sums in global memory or
// left beside them.
#pragma once

#include "ffa/common/ptx/atomics.cuh"
#include "ffa/common/ptx/shared.cuh"

namespace magi {

// The 16 rows of a warp, by way of shared memory, so that eight threads write 128 bytes of a row
// together: L2 adds those 1.6 times as fast as pieces of 32 bytes.
template <int kColumns, int kTileRows>
struct ShareWriter {
  static constexpr int kHalf =
      kColumns / 2;  // columns at a time: as many bytes as kColumns of 16 bits

  uint32_t rows;  // the warp's 16 rows of a tile of 16-bit rows, which nobody else reads any more
  int lane;

  // Chunk of 16 bytes of a row. The swizzle keeps the threads of a store in different banks.
  __device__ __forceinline__ uint32_t at(int row, int chunk) const {
    return rows + chunk / 8 * (kTileRows * 128) + row * 128 + ((chunk ^ 2 * (row % 4)) % 8) * 16;
  }

  // Accumulators to the chunks of a half.
  __device__ __forceinline__ void stage(const float (&x)[kHalf], int half) const {
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
      const int i = half * (kHalf / 2) + 4 * j, chunk = 2 * j + lane % 4 / 2, row = lane / 4;
      sts_float2(at(row, chunk) + lane % 2 * 8, x[i], x[i + 1]);
      sts_float2(at(row + 8, chunk) + lane % 2 * 8, x[i + 2], x[i + 3]);
    }
  }

  // Lane i holds which row of `to`, of `width` columns, row i of the warp belongs to; -1: none.
  __device__ __forceinline__ void write(const float (&x)[kHalf], int row_of_lane, float* to,
                                        int width, bool adds) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __syncwarp();
      stage(x, half);
      __syncwarp();
#pragma unroll 1
      for (int i = lane / 8; i < 16; i += 4) {
        const int row = __shfl_sync(0xffffffff, row_of_lane, i);
#pragma unroll
        for (int chunk = lane % 8; chunk < kHalf / 4; chunk += 8) {
          const int column = half * kHalf + 4 * chunk;
          if (row < 0 || column >= width) continue;
          const float4 four = lds_float4(at(i, chunk));
          float* place = to + static_cast<int64_t>(row) * width + column;
          if (adds)
            add_to_global_x4(place, four.x, four.y, four.z, four.w);
          else
            *reinterpret_cast<float4*>(place) = four;
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace magi
