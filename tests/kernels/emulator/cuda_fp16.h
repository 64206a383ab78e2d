// SPDX-License-Identifier: Apache-2.0
// float16 of CUDA.
#pragma once

#include <memory>

#include "cuda_types.h"

namespace hopper {
// All of them as float32: the compiler's conversion is a slow function.
inline const float* halves() {
  static const std::unique_ptr<float[]> all = [] {
    std::unique_ptr<float[]> floats(new float[1 << 16]);
    for (uint32_t i = 0; i < 1 << 16; ++i)
      floats[i] = static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(i)));
    return floats;
  }();
  return all.get();
}
}  // namespace hopper

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(hopper::bits_as<uint16_t>(static_cast<_Float16>(x))) {}
  operator float() const { return hopper::halves()[bits]; }
};
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
