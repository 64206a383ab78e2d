// SPDX-License-Identifier: Apache-2.0
// Copies of tiles from device to shared memory that run beside the arithmetic (cp.async), for sm_80
// and newer.
#pragma once

#include <cstdint>

#include "device/shared.cuh"
#include "ffa/portable/mma.cuh"

namespace magi::portable {

// 16 bytes, or zeros where nothing `exists`.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_float(uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Zeroes a row of a tile of kRows rows and kD columns.
template <int kRows, int kD>
__device__ __forceinline__ void zero_row(uint32_t tile, int row) {
#pragma unroll 1
  for (int chunk = 0; chunk < kD / 8; ++chunk)
    zero_chunk(tile + chunk / 8 * kRows * 128 + row * 128 + chunk % 8 * 16);
}

// All threads: kRows rows of kD columns to a tile. `offset_of(row)` is where a row begins behind
// `base`, in elements, or kNoRow for one that does not exist: it arrives as zeros, as do columns
// from `columns` on. Eight lanes copy 128 bytes of a row.
constexpr int64_t kNoRow = -1;

template <int kRows, int kD, int kThreads, typename T, typename OffsetOf>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T* base, int columns,
                                          OffsetOf offset_of) {
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "a thread keeps its chunk");
  const int thread = thread_again(), chunk = thread % 8, first = thread / 8;
  const uint32_t to = tile + chunk_at<128>(first, chunk);
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const int64_t offset = offset_of(first + row);
#pragma unroll
    for (int panel = 0; panel < kD / 64; ++panel) {
      const int column = 64 * panel + 8 * chunk;
      const bool exists = offset != kNoRow && column < columns;
      copy_chunk(to + panel * kRows * 128 + row * 128, base + (exists ? offset + column : 0),
                 exists);
    }
  }
}

// The same of rows that lie `stride` elements apart; those of `first_row` on, of which there are
// `num_rows` from 0 on. Few registers: one address, which moves on.
template <int kRows, int kD, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(uint32_t tile, const T* base, int64_t stride, int columns,
                                          int first_row, int num_rows) {
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "a thread keeps its chunk");
  const int thread = thread_again(), chunk = thread % 8, first = thread / 8;
  const uint32_t to = tile + chunk_at<128>(first, chunk);
  const T* from = base + (first_row + first) * stride + 8 * chunk;
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const int at = first_row + first + row;
#pragma unroll
    for (int panel = 0; panel < kD / 64; ++panel)
      copy_chunk(to + panel * kRows * 128 + row * 128, from + 64 * panel,
                 at >= 0 && at < num_rows && 64 * panel + 8 * chunk < columns);
    from += kRowsAtOnce * stride;
    asm volatile("" : "+l"(from));  // not all addresses at once
  }
}

}  // namespace magi::portable
