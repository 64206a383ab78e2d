// SPDX-License-Identifier: Apache-2.0
// csrc/device/arithmetic.cuh for the CPU.
#pragma once

#include "device/types.cuh"

namespace magi {

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float tanh_fast(float x) { return std::tanh(x); }
inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }

template <typename T>
uint32_t pack_pair(float low, float high) {
  const T pair[2] = {T(low), T(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

}  // namespace magi
