// SPDX-License-Identifier: Apache-2.0
// bfloat16 of CUDA.
#pragma once

#include "cuda_types.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const uint32_t all = __float_as_uint(x);
    bits = x != x ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16(a), __nv_bfloat16(b)};
}
