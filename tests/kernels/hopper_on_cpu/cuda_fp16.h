// SPDX-License-Identifier: Apache-2.0
// float16 of CUDA.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return static_cast<float>(value); }
};
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
