// SPDX-License-Identifier: Apache-2.0
// Combines the parts of a tile that is split along the keys. Each part leaves its unfinished output
// in the workspace. The part that arrives last combines all of them, always in the order of the
// keys, so that results do not depend on timing.
#pragma once

#include "ffa/common/softmax.cuh"
#include "ffa/portable/fwd/config.h"
#include "ffa/portable/fwd/params.h"

namespace magi::portable {

constexpr int kArrivalsAt = 4;     // int32 words into the workspace
constexpr int kPartialsAt = 1024;  // int32 words into the workspace

// Pairs of floats that a thread leaves of a part: its output, then reference and sum of its rows.
template <typename C>
__host__ __device__ constexpr int pairs_of_part() {
  return C::kAtoms * (C::kDv / 4 + 2);
}

// Leaves this part in the workspace. True for the part that came last: then o and state hold the
// whole. `flag` is a word of shared memory.
template <typename C>
__device__ bool combine_splits(const FwdKernelParams& p, float (&o)[C::kAtoms][C::kDv / 2],
                               SoftmaxState<C> (&state)[C::kAtoms], int work_tile, Part part,
                               uint32_t flag) {
  constexpr int kPairs = pairs_of_part<C>(), kOfAtom = C::kDv / 4 + 2;
  float2* first = reinterpret_cast<float2*>(p.partials) +
                  static_cast<int64_t>(work_tile) * p.max_parts * kPairs * C::kThreads +
                  threadIdx.x;
  float2* mine = first + part.index * kPairs * C::kThreads;
#pragma unroll
  for (int atom = 0; atom < C::kAtoms; ++atom) {
    float2* to = mine + atom * kOfAtom * C::kThreads;
#pragma unroll
    for (int i = 0; i < C::kDv / 4; ++i)
      to[i * C::kThreads] = make_float2(o[atom][2 * i], o[atom][2 * i + 1]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      to[(C::kDv / 4 + r) * C::kThreads] =
          make_float2(state[atom].reference[r], state[atom].sum[r]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrivals = p.workspace + kArrivalsAt + work_tile;
    const bool last = atomicAdd(arrivals, 1) == part.count - 1;
    if (last) *arrivals = 0;
    __threadfence();
    sts_int(flag, last);
  }
  __syncthreads();
  if (!lds_int(flag)) return false;
#pragma unroll
  for (int atom = 0; atom < C::kAtoms; ++atom) {
    const float2* from = first + atom * kOfAtom * C::kThreads;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
    for (int i = 0; i < part.count; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        top[r] = fmaxf(top[r], __ldcg(from + (i * kPairs + C::kDv / 4 + r) * C::kThreads).x);
    state[atom].reset();
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) o[atom][i] = 0.f;
#pragma unroll 1
    for (int i = 0; i < part.count; ++i) {
      const float2* at = from + i * kPairs * C::kThreads;
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 stats = __ldcg(at + (C::kDv / 4 + r) * C::kThreads);
        factor[r] = top[r] == -INFINITY ? 0.f : exp2_fast(stats.x - top[r]);
        state[atom].sum[r] += stats.y * factor[r];
      }
#pragma unroll
      for (int j = 0; j < C::kDv / 4; ++j) {
        const float2 x = __ldcg(at + j * C::kThreads);
        o[atom][2 * j] += x.x * factor[j % 2];
        o[atom][2 * j + 1] += x.y * factor[j % 2];
      }
    }
    state[atom].reference[0] = top[0];
    state[atom].reference[1] = top[1];
  }
  return true;
}

}  // namespace magi::portable
