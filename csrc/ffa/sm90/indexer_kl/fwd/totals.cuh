// SPDX-License-Identifier: Apache-2.0
// What the divergence of a query is made of, added up key by key and over threads in a fixed order.
#pragma once

#include "device/shared.cuh"
#include "ffa/common/scores.cuh"

namespace magi {

struct KlTotals {
  float mass = 0.f, entropy = 0.f, cross = 0.f;  // sums of P, P log P and P score
  float top = -INFINITY, sum = 0.f;              // of exp(score - top)

  __device__ __forceinline__ void add(float target, float score) {
    mass += target;
    entropy += target > 0.f ? target * log2_fast(target) * kLn2 : target;
    cross = fmaf(target, score, cross);
    const float above = fmaxf(top, score);
    sum = sum * exp2_fast((top - above) * kLog2e) + exp2_fast((score - above) * kLog2e);
    top = above;
  }

  __device__ __forceinline__ void add(const KlTotals& other) {
    mass += other.mass;
    entropy += other.entropy;
    cross += other.cross;
    const float above = fmaxf(top, other.top), base = above == -INFINITY ? 0.f : above;
    sum =
        sum * exp2_fast((top - base) * kLog2e) + other.sum * exp2_fast((other.top - base) * kLog2e);
    top = above;
  }

  // Over the rows of a warp; the four threads of a row have the same.
  __device__ __forceinline__ void add_rows() {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) {
      KlTotals other;
      other.mass = __shfl_xor_sync(0xffffffff, mass, far);
      other.entropy = __shfl_xor_sync(0xffffffff, entropy, far);
      other.cross = __shfl_xor_sync(0xffffffff, cross, far);
      other.top = __shfl_xor_sync(0xffffffff, top, far);
      other.sum = __shfl_xor_sync(0xffffffff, sum, far);
      add(other);
    }
  }

  __device__ __forceinline__ void store(uint32_t to) const {
    sts_float4(to, mass, entropy, cross, top);
    sts_int(to + 16, __float_as_int(sum));
  }
  __device__ __forceinline__ static KlTotals load(uint32_t from) {
    const float4 x = lds_float4(from);
    KlTotals t;
    t.mass = x.x, t.entropy = x.y, t.cross = x.z, t.top = x.w;
    t.sum = __int_as_float(lds_int(from + 16));
    return t;
  }

  __device__ __forceinline__ float lse() const { return top + log2_fast(sum) * kLn2; }
  __device__ __forceinline__ float divergence() const {
    // NaN stays NaN.
    if (mass <= 0.f) return 0.f;
    return (entropy - cross) / mass - log2_fast(mass) * kLn2 + lse();
  }
};

}  // namespace magi
