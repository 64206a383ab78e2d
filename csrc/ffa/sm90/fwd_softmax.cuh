// SPDX-License-Identifier: Apache-2.0
// Online softmax of one consumer warpgroup, in registers. Each thread holds two rows; four threads share a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../common/wgmma.cuh"

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

// Scores become tanh(scale * score); the cap itself is part of scale_log2.
template <typename C>
__device__ __forceinline__ void cap_scores(float (&s)[C::kBlockN / 2], float scale) {
#pragma unroll
  for (int i = 0; i < C::kBlockN / 2; ++i) s[i] = tanh_fast(s[i] * scale);
}

// The lowest n bits; n may be 32.
__device__ __forceinline__ uint32_t low_bits(int n) {
  uint32_t r;
  asm("shl.b32 %0, 1, %1;" : "=r"(r) : "r"(n));  // shifts out to 0 at 32, unlike <<
  return r - 1;
}

// Of the columns 8j + 2q + {0, 1} that a thread holds, how many lie below `limit` (clamped to the block).
template <int kBlockN>
__device__ __forceinline__ int columns_below(int limit, int q) {
  const int inside = min(max(limit, 0), kBlockN);
  return 2 * (inside >> 3) + min(max((inside & 7) - 2 * q, 0), 2);
}

// -inf outside each row's key interval. One bit per element: the compiler turns the tests into predicate moves.
template <typename C>
__device__ __forceinline__ void mask_scores(float (&s)[C::kBlockN / 2], int k0, const int2 (&keys)[2], int lane) {
  const int q = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t below_hi = low_bits(columns_below<C::kBlockN>(keys[r].y - k0, q));
    const uint32_t below_lo = low_bits(columns_below<C::kBlockN>(keys[r].x - k0, q));
    const uint32_t keep = below_hi & ~below_lo;
#pragma unroll
    for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float& x = s[4 * j + 2 * r + b];
        x = (keep & (1u << (2 * j + b))) ? x : -INFINITY;
      }
    }
  }
}

// The A fragments of P.
template <typename C>
__device__ __forceinline__ void pack_scores(uint32_t (&packed)[C::kBlockN / 4], const float (&s)[C::kBlockN / 2]) {
#pragma unroll
  for (int i = 0; i < C::kBlockN / 4; ++i) packed[i] = pack_pair<typename C::T>(s[2 * i], s[2 * i + 1]);
}

template <typename C>
struct SoftmaxState {
  float reference[2];  // offset of the exponent: a score, up to `slack` below the maximum so far
  float sum[2];        // of this thread's columns
  float factor[2];     // of the last change of the reference

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = -INFINITY;
      sum[r] = 0.f;
    }
  }

  // Row maxima of a block. True if the output must be rescaled by `factor`. That is skipped while no row grew by more than
  // `slack` (log2): P then stays below 2^slack, and the result is exact after normalisation because numerator and
  // denominator share the offset. The whole warpgroup decides as one, because a rescale waits for the output
  // multiplication, and PTX wants the same wgmma instructions from all four warps.
  __device__ __forceinline__ bool update(const float (&s)[C::kBlockN / 2], float scale_log2, float slack, int group) {
    float top[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
      for (int j = 1; j < C::kBlockN / 8; ++j) {
        even = fmaxf(even, s[4 * j + 2 * r]);
        odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
      }
      top[r] = fmaxf(even, odd);
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 2));
      grown |= (top[r] - reference[r]) * scale_log2 > slack;  // false for the NaN of -inf - -inf
    }
    if (!any_at_barrier(1 + group, 128, grown)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], reference[r]);
      factor[r] = top[r] == -INFINITY ? 1.f : exp2_fast((reference[r] - top[r]) * scale_log2);
      reference[r] = top[r];
      sum[r] *= factor[r];
    }
    return true;
  }

  __device__ __forceinline__ void rescale(float (&o)[C::kDv / 2]) const {
#pragma unroll
    for (int j = 0; j < C::kDv / 8; ++j) {
      o[4 * j] *= factor[0];
      o[4 * j + 1] *= factor[0];
      o[4 * j + 2] *= factor[1];
      o[4 * j + 3] *= factor[1];
    }
  }

  // Scores become P, relative to the reference.
  __device__ __forceinline__ void exponentiate(float (&s)[C::kBlockN / 2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float offset = reference[r] == -INFINITY ? 0.f : reference[r] * scale_log2;
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int j = 0; j < C::kBlockN / 8; ++j) {
        float& a = s[4 * j + 2 * r];
        float& b = s[4 * j + 2 * r + 1];
        a = exp2_fast(a * scale_log2 - offset);
        b = exp2_fast(b * scale_log2 - offset);
        even += a;
        odd += b;
      }
      sum[r] += even + odd;
    }
  }
};

}  // namespace magi
