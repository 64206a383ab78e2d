// SPDX-License-Identifier: Apache-2.0
// Words in registers: thin wrappers over PTX.
#pragma once

#include <cstdint>

namespace magi {

// The lowest n bits; n may be 32.
__device__ __forceinline__ uint32_t low_bits(int n) {
  uint32_t r;
  asm("shl.b32 %0, 1, %1;" : "=r"(r) : "r"(n));  // shifts out to 0 at 32, unlike <<
  return r - 1;
}

// The upper half of 64 bits.
template <uint32_t kFactor>
__device__ __forceinline__ uint32_t high_of_product(uint32_t x) {
  uint32_t high;
  asm volatile("mul.hi.u32 %0, %1, %2;" : "=r"(high) : "r"(x), "n"(kFactor));
  return high;
}

// In a register of its own.
__device__ __forceinline__ float own_copy(float x) {
  float copy;
  asm volatile("mov.b32 %0, %1;" : "=f"(copy) : "f"(x));
  return copy;
}

}  // namespace magi
