// SPDX-License-Identifier: Apache-2.0
// Products of 64 rows with 64 rows of latents.
#pragma once

#include "ffa/sm90/wgmma.cuh"

namespace magi {

// x += rows latents^T, of atoms of 64 columns; the first one sets x. a and b are low words of
// descriptors of whole tiles.
template <typename T, int kBeginAtom, int kEndAtom>
__device__ __forceinline__ void multiply_atoms(float (&x)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 4 * kBeginAtom; step < 4 * kEndAtom; ++step) {
    const int at = (step / 4 * 64 * 128 + step % 4 * 32) / 16;
    Wgmma<T, 64, 0>::ss(x, operand(a, at), operand(b, at), step > 0);
  }
}

}  // namespace magi
