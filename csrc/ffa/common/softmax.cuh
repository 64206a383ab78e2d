// SPDX-License-Identifier: Apache-2.0
// Online softmax of one consumer warpgroup, in registers. Each thread holds two rows; four threads
// share a row.
#pragma once

#include <climits>
#include <cstdint>

#include "ffa/common/scores.cuh"

namespace magi {

// Scores become tanh(scale * score); the cap itself is part of scale_log2.
template <typename C>
__device__ __forceinline__ void cap_scores(float (&s)[C::kBlockN / 2], float scale) {
#pragma unroll
  for (int i = 0; i < C::kBlockN / 2; ++i) s[i] = tanh_fast(s[i] * scale);
}

// The A fragments of P.
template <typename C>
__device__ __forceinline__ void pack_scores(uint32_t (&packed)[C::kBlockN / 4],
                                            const float (&s)[C::kBlockN / 2]) {
#pragma unroll
  for (int i = 0; i < C::kBlockN / 4; ++i)
    packed[i] = pack_pair<typename C::T>(s[2 * i], s[2 * i + 1]);
}

template <typename C>
struct SoftmaxState {
  float reference[2];  // offset of the exponents, base 2: at most `slack` below the maximum so far;
                       // -inf before the first key
  float sum[2];        // of this thread's columns
  float factor[2];     // of the last change of the reference
  int limit[2];        // bits of the lowest score that asks for a new reference, as an integer; the
                       // lowest of all integers if every score has to be looked at

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = -INFINITY;
      sum[r] = 0.f;
      limit[r] = INT_MIN;
    }
  }

  // Fits the references to the scores. True if the output of the warp must be rescaled by `factor`.
  // While no exponent is above `slack` the reference stays: the result is exact after normalisation
  // because numerator and denominator share it. Whether one is above is told from the bits, as
  // integers: positive floats have the same order, and negative ones are below them. The integer
  // maximum of three takes a fraction of the time of the float one, and no shuffles are needed.
  __device__ __forceinline__ bool refer(const float (&s)[C::kBlockN / 2], float scale_log2,
                                        float unscale, float slack) {
    bool above = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int top[2];
#pragma unroll
      for (int j = 0; j < C::kBlockN / 8; ++j) {
        const int a = __float_as_int(s[4 * j + 2 * r]), b = __float_as_int(s[4 * j + 2 * r + 1]);
        top[j % 2] = j < 2 ? max(a, b) : __vimax3_s32(top[j % 2], a, b);
      }
      above |= max(top[0], top[1]) >= limit[r];
    }
    if (!__any_sync(0xffffffff, above)) return false;
    raise(s, scale_log2, unscale, slack);
    return true;
  }

  // Moves the references to the maxima.
  __device__ __forceinline__ void raise(const float (&s)[C::kBlockN / 2], float scale_log2,
                                        float unscale, float slack) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
      for (int j = 1; j < C::kBlockN / 8; ++j) {
        even = fmaxf(even, s[4 * j + 2 * r]);
        odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
      }
      float top = fmaxf(even, odd);
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      top = fmaxf(top * scale_log2, reference[r]);
      move_reference(r, top, unscale, slack);
    }
  }

  // To `top`, which is not below it.
  __device__ __forceinline__ void move_reference(int r, float top, float unscale, float slack) {
    factor[r] = top == -INFINITY ? 1.f : exp2_fast(reference[r] - top);
    reference[r] = top;
    sum[r] *= factor[r];
    const float allowed = top * unscale + slack;
    limit[r] = allowed > 0.f ? __float_as_int(allowed) + 1 : INT_MIN;
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
    float offset[2], even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = reference[r] == -INFINITY ? 0.f : reference[r];
#pragma unroll
    for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& a = s[4 * j + 2 * r];
        float& b = s[4 * j + 2 * r + 1];
        a = exp2_fast(a * scale_log2 - offset[r]);
        b = exp2_fast(b * scale_log2 - offset[r]);
        even[r] += a;
        odd[r] += b;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += even[r] + odd[r];
  }
};

}  // namespace magi
