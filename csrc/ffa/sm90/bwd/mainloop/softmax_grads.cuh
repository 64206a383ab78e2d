// SPDX-License-Identifier: Apache-2.0
// P of a step from its scores, and dS from P, or its factor, and dP; dS to shared memory.
#pragma once

#include "device/arithmetic.cuh"
#include "device/shared.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"

namespace magi {

template <typename C>
using ScoresOf = float[C::kBlockM / 2];
template <typename C>
using PackedOf = uint32_t[C::kBlockM / 4];
template <typename C>
using DeltasOf = float2[C::kBlockM / 8];  // of the queries of a thread's columns

// Scores to P, which is packed, after `mask`; in s stays the factor of dP - delta, but with
// kRoundsP. With `kPacksFactor` that is packed in place of P. Columns have their own offsets, from
// `stats_at` on.
template <typename C, bool kRoundsP, bool kPacksFactor, typename Mask>
__device__ __forceinline__ void scores_to_p(const BwdKernelParams& p, uint32_t stats_at,
                                            ScoresOf<C>& s, PackedOf<C>& packed, Mask mask) {
  if (C::kIsGeneral && p.has_softcap) {
#pragma unroll
    for (int i = 0; i < C::kBlockM / 2; ++i) s[i] = tanh_fast(s[i] * p.scale);
  }
  mask();
  const uint32_t stats = stats_at + thread_again() % 4 * 8;
  auto pack = [&](int j, const float (&x)[4]) {
    packed[2 * j] = pack_pair<typename C::T>(x[0], x[1]);
    packed[2 * j + 1] = pack_pair<typename C::T>(x[2], x[3]);
  };
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    const float2 offset = lds_float2(stats + C::stat_at(8 * j));
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      e[i] = exp2_fast(s[4 * j + i] * p.scale_log2 - (i % 2 ? offset.y : offset.x));
    if constexpr (!kPacksFactor) pack(j, e);
    if constexpr (kPacksFactor || !kRoundsP) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A masked score is -inf and its P zero; so must be the product.
        if (C::kIsGeneral && p.has_softcap)
          e[i] = e[i] > 0.f ? e[i] * (1.f - s[4 * j + i] * s[4 * j + i]) : 0.f;
        if constexpr (!kPacksFactor) s[4 * j + i] = e[i];
      }
    }
    if constexpr (kPacksFactor) pack(j, e);
  }
}

// dS^T, packed, from P^T and dP^T.
template <typename C>
__device__ __forceinline__ void score_grads(const PackedOf<C>& probabilities, const ScoresOf<C>& dp,
                                            const DeltasOf<C>& deltas, PackedOf<C>& packed) {
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = unpack_pair<typename C::T>(probabilities[2 * j + r]);
      packed[2 * j + r] = pack_pair<typename C::T>(x.x * (dp[4 * j + 2 * r] - deltas[j].x),
                                                   x.y * (dp[4 * j + 2 * r + 1] - deltas[j].y));
    }
  }
}

// The same, with deltas loaded when they are needed.
template <typename C>
__device__ __forceinline__ void score_grads(const PackedOf<C>& probabilities, const ScoresOf<C>& dp,
                                            uint32_t deltas_at, PackedOf<C>& packed) {
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    const float2 delta = lds_float2(deltas_at + C::stat_at(8 * j));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = unpack_pair<typename C::T>(probabilities[2 * j + r]);
      packed[2 * j + r] = pack_pair<typename C::T>(x.x * (dp[4 * j + 2 * r] - delta.x),
                                                   x.y * (dp[4 * j + 2 * r + 1] - delta.y));
    }
  }
}

// The same from the factors in s; all but the first deltas are loaded here, for want of
// registers.
template <typename C, int kEarly>
__device__ __forceinline__ void score_grads_of_factors(const ScoresOf<C>& s, const ScoresOf<C>& dp,
                                                       const float2* first, uint32_t deltas_at,
                                                       PackedOf<C>& packed) {
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    const float2 delta = j < kEarly ? first[j] : lds_float2(deltas_at + C::stat_at(8 * j));
    packed[2 * j] = pack_pair<typename C::T>(s[4 * j] * (dp[4 * j] - delta.x),
                                             s[4 * j + 1] * (dp[4 * j + 1] - delta.y));
    packed[2 * j + 1] = pack_pair<typename C::T>(s[4 * j + 2] * (dp[4 * j + 2] - delta.x),
                                                 s[4 * j + 3] * (dp[4 * j + 3] - delta.y));
  }
}

// dS as rows of queries; this warpgroup's keys are one column tile of 64.
template <typename C>
__device__ __forceinline__ void store_ds(const PackedOf<C>& packed, uint32_t ds) {
  const int thread = thread_again() - 128, group = thread / 128, warp = thread % 128 / 32,
            lane = thread % 32;
  // Lane 8i + l addresses row l of matrix i: (keys 0-7, keys 8-15) x (queries 0-7, queries 8-15).
  const int query = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
  const uint32_t at = ds + group * (C::kBlockM * 128) + query * 128 + ((chunk ^ (query & 7)) << 4);
#pragma unroll
  for (int j = 0; j < C::kBlockM / 16; ++j)
    store_matrix_transposed_x4(at + j * 2048, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                               packed[4 * j + 3]);
}

}  // namespace magi
