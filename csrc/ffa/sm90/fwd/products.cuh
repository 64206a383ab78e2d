// SPDX-License-Identifier: Apache-2.0
// The two products of the forward, each of one key block and the 64 rows of a warpgroup.
#pragma once

#include "ffa/sm90/wgmma.cuh"

namespace magi {

// scores = Q K^T of one block. q and k are low words of descriptors.
template <typename C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kBlockN / 2], uint32_t q, uint32_t k) {
  using Mma = Wgmma<typename C::T, C::kBlockN, 0>;
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int in_atom = (step % 4) * 32, atom = step / 4;
    Mma::ss(s, operand(q, (atom * C::kBlockM * 128 + in_atom) / 16),
            operand(k, (atom * C::kBlockN * 128 + in_atom) / 16), step > 0);
  }
}

// out += P V of one block, P packed in registers. v is the low word of a descriptor.
template <typename C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kDv / 2],
                                            const uint32_t (&p)[C::kBlockN / 4], uint32_t v) {
  using Mma = Wgmma<typename C::T, C::kDv, 1>;
#pragma unroll
  for (int step = 0; step < C::kBlockN / 16; ++step)
    Mma::rs(o, p + 4 * step, operand(v, step * 2048 / 16), 1);
}

}  // namespace magi
