// SPDX-License-Identifier: Apache-2.0
// The five products of a step of the backward, each divided among the warps of a CTA.
#pragma once

#include "ffa/portable/bwd/config.h"
#include "ffa/portable/bwd/rows.cuh"
#include "ffa/portable/mma.cuh"

namespace magi::portable {

// d += A B^T over kDepth columns; rows of both tiles are n and m. a and b are this lane's
// addresses.
template <typename T, int kDepth, int kARows, int kBRows, int kAtoms, int kValues>
__device__ __forceinline__ void multiply_rows(float (&d)[kAtoms][kValues], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    const int panel = step / 4, x = step % 4 * 32;
    uint32_t fa[kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom)
      load_matrix(fa[atom], (a ^ x) + panel * kARows * 128 + atom * 16 * 128);
#pragma unroll
    for (int n = 0; n < kValues / 8; ++n) {
      uint32_t fb[4];
      load_matrix(fb, (b ^ x) + panel * kBRows * 128 + n * 16 * 128);
      mma_pair<T>(d, 8 * n, fa, fb);
    }
  }
}

// This lane's address of the first fragment at `column` of a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t at_column(uint32_t lane_address, int column) {
  return (lane_address ^ (column % 64 * 2)) + column / 64 * kRows * 128;
}

// dv += P^T dO or dk += dS^T Q: A is P^T or dS^T, with kBlockM columns, b this lane's address in dO
// or Q.
template <typename C>
__device__ __forceinline__ void add_key_grads(float (&d)[C::kAtoms][C::kColumns / 2], uint32_t a,
                                              uint32_t b, int column0) {
  using T = typename C::T;
  constexpr int kRow = C::kScoreRowBytes, kPanel = kRow / 2;  // columns of a panel
#pragma unroll
  for (int step = 0; step < C::kBlockM / 16; ++step) {
    uint32_t fa[C::kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom)
      load_matrix(fa[atom], (a ^ (16 * step % kPanel * 2)) +
                                16 * step / kPanel * C::kBlockN * kRow + atom * 16 * kRow);
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; ++n) {
      uint32_t fb[4];
      load_matrix_transposed(fb, at_column<C::kBlockM>(b, column0 + 16 * n) + step * 16 * 128);
      mma_pair<T>(d, 8 * n, fa, fb);
    }
  }
}

// dq of a block = dS K.
template <typename C>
__device__ __forceinline__ void multiply_dq(float (&d)[C::kDqAtoms][C::kDqColumns / 2], uint32_t ds,
                                            uint32_t k, int row0, int column0) {
  using T = typename C::T;
  constexpr int kRow = C::kScoreRowBytes, kPanel = kRow / 2;
  clear(d);
#pragma unroll
  for (int step = 0; step < C::kBlockN / 16; ++step) {
    uint32_t fa[C::kDqAtoms][4];
#pragma unroll
    for (int atom = 0; atom < C::kDqAtoms; ++atom) {
      const int query = row0 + 16 * atom;
      load_matrix_transposed(fa[atom], (ds ^ (query % kPanel * 2)) +
                                           query / kPanel * C::kBlockN * kRow + step * 16 * kRow);
    }
#pragma unroll
    for (int n = 0; n < C::kDqColumns / 16; ++n) {
      uint32_t fb[4];
      load_matrix_transposed(fb, at_column<C::kBlockN>(k, column0 + 16 * n) + step * 16 * 128);
      mma_pair<T>(d, 8 * n, fa, fb);
    }
  }
}

__device__ __forceinline__ void add_four(float* to, int lane, const float* values) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + dq_slot(lane, 0)),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + dq_slot(lane, i)),
                 "f"(values[i])
                 : "memory");
#endif
}

}  // namespace magi::portable
