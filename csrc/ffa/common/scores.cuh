// SPDX-License-Identifier: Apache-2.0
// Scores in accumulator registers: unpacking and masks.
#pragma once

#include <cmath>
#include <cstdint>

#include "device/arithmetic.cuh"
#include "device/registers.cuh"
#include "device/types.cuh"

namespace magi {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t x);
template <>
__device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack_pair<fp16>(uint32_t x) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

// How many of the columns 8j + 2q + {0, 1} that a thread holds lie below `limit` (clamped to the
// block).
template <int kBlockN>
__device__ __forceinline__ int columns_below(int limit, int q) {
  const int inside = min(max(limit, 0), kBlockN);
  return 2 * (inside >> 3) + min(max((inside & 7) - 2 * q, 0), 2);
}

// -inf outside each row's interval of columns, which are counted from the block's first, k0. One
// bit per element: the compiler turns the tests into predicate moves.
template <int kBlockN>
__device__ __forceinline__ void mask_scores(float (&s)[kBlockN / 2], int k0, const int2 (&keys)[2],
                                            int lane) {
  const int q = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t below_hi = low_bits(columns_below<kBlockN>(keys[r].y - k0, q));
    const uint32_t below_lo = low_bits(columns_below<kBlockN>(keys[r].x - k0, q));
    const uint32_t keep = below_hi & ~below_lo;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float& x = s[4 * j + 2 * r + b];
        x = (keep & (1u << (2 * j + b))) ? x : -INFINITY;
      }
    }
  }
}

}  // namespace magi
