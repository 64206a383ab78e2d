// SPDX-License-Identifier: Apache-2.0
// Scores as unsigned numbers of the same order.
#pragma once

#include <cstdint>

namespace magi {

// Greater for greater scores; NaN above all, -0 as 0. Never 0.
__device__ __forceinline__ uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint32_t rank_of(uint32_t rank) { return rank; }

}  // namespace magi
