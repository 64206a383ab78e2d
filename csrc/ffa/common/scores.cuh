// SPDX-License-Identifier: Apache-2.0
// Arithmetic on scores in accumulator registers: base-2 exponentials, packing to 16 bits, masks.
#pragma once

#include <cmath>
#include <cstdint>

#include "ffa/common/types.cuh"

namespace magi {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack_pair<fp16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

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

__device__ __forceinline__ float2 lds_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// The lowest n bits; n may be 32.
__device__ __forceinline__ uint32_t low_bits(int n) {
  uint32_t r;
  asm("shl.b32 %0, 1, %1;" : "=r"(r) : "r"(n));  // shifts out to 0 at 32, unlike <<
  return r - 1;
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
