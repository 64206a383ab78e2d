// SPDX-License-Identifier: Apache-2.0
// Words, vectors and functions of CUDA that need no thread, for kernels that g++ compiles.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

using std::max;
using std::min;
using std::signbit;

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace hopper {
template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are as many");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace hopper

inline float __uint_as_float(uint32_t bits) { return hopper::bits_as<float>(bits); }
inline float __int_as_float(int bits) { return hopper::bits_as<float>(bits); }
inline int __float_as_int(float x) { return hopper::bits_as<int>(x); }
inline uint32_t __float_as_uint(float x) { return hopper::bits_as<uint32_t>(x); }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
