// SPDX-License-Identifier: Apache-2.0
// Words, vectors and 16-bit floats of CUDA for kernels that are compiled for the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

using std::max;
using std::min;

struct int4 {
  int x, y, z, w;
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
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct __nv_bfloat162 {
  uint32_t bits;
};
struct __half2 {
  _Float16 x, y;
};
inline uint32_t bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {bfloat16(a) | bfloat16(b) << 16};
}
inline __half2 __floats2half2_rn(float a, float b) {
  return {static_cast<_Float16>(a), static_cast<_Float16>(b)};
}
inline float2 __half22float2(__half2 x) {
  return {static_cast<float>(x.x), static_cast<float>(x.y)};
}

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
