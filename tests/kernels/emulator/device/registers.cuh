// SPDX-License-Identifier: Apache-2.0
// csrc/device/registers.cuh for the CPU.
#pragma once

#include "cuda_runtime.h"

namespace magi {

inline uint32_t low_bits(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }
template <uint32_t kFactor>
uint32_t high_of_product(uint32_t x) {
  return static_cast<uint64_t>(x) * kFactor >> 32;
}
inline float own_copy(float x) { return x; }

}  // namespace magi
