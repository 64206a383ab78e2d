// SPDX-License-Identifier: Apache-2.0
// Warp-level matrix multiply (mma.sync m16n8k16) and the loads of its operands (ldmatrix), for
// sm_80 and newer: thin wrappers over PTX, and the layout of tiles in shared memory.
//
// A tile is stored in panels of 64 columns. A row of a panel is 128 bytes, and its 16-byte chunks
// are swizzled by the row, so that ldmatrix and 16-byte copies have no bank conflicts. Narrower
// tiles have one panel with rows of 64 bytes.
#pragma once

#include <cstdint>

#include "device/types.cuh"

namespace magi::portable {

// Byte offset of a 16-byte chunk inside a panel.
template <int kRowBytes>
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a panel has 64 or 32 columns");
  const int swizzle = kRowBytes == 128 ? row & 7 : row >> 1 & 3;
  return row * kRowBytes + ((chunk ^ swizzle) << 4);
}

// Where a lane's row of the operand at row 0, column 0 lies. `Straight` is for A fragments of a
// row-major tile and, transposed, B fragments of a tile whose rows are k; `Crossed` for B fragments
// of a tile whose rows are n and, transposed, A fragments of one whose rows are k. The operand 16
// columns on is at `lane ^ 32`, the next at `lane ^ 64`, inside a panel; 16 rows on at
// `lane + 16 * row bytes`.
template <int kRowBytes>
__device__ __forceinline__ uint32_t straight_lane(uint32_t tile, int lane) {
  return tile + chunk_at<kRowBytes>(lane % 16, lane / 16);
}
template <int kRowBytes>
__device__ __forceinline__ uint32_t crossed_lane(uint32_t tile, int lane) {
  return tile + chunk_at<kRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d += a b. Lane l holds rows l/4 and l/4 + 8 of d; d[0], d[1] are columns 2 (l%4), 2 (l%4) + 1 of
// the first, d[2], d[3] of the second.
template <typename T>
__device__ __forceinline__ void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[atom] += a[atom] (16 x 16) times two neighbouring B fragments.
template <typename T, int kAtoms, int kColumns>
__device__ __forceinline__ void mma_pair(float (&d)[kAtoms][kColumns], int column,
                                         const uint32_t (&a)[kAtoms][4], const uint32_t (&b)[4]) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    mma<T>(&d[atom][column], a[atom], b[0], b[1]);
    mma<T>(&d[atom][column + 4], a[atom], b[2], b[3]);
  }
}

template <int kAtoms, int kColumns>
__device__ __forceinline__ void clear(float (&d)[kAtoms][kColumns]) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom)
#pragma unroll
    for (int i = 0; i < kColumns; ++i) d[atom][i] = 0.f;
}

}  // namespace magi::portable
