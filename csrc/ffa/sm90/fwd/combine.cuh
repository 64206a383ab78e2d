// SPDX-License-Identifier: Apache-2.0
// Combines tiles that are split along the keys (ffa/common/part.cuh). Each part leaves its
// unfinished output in the workspace. The part that arrives last combines all of them, always in
// the order of the keys, so that results do not depend on timing.
#pragma once

#include "device/mbarrier.cuh"
#include "device/atomics.cuh"
#include "ffa/common/part.cuh"
#include "ffa/sm90/fwd/config.h"
#include "ffa/sm90/fwd/params.h"
#include "ffa/common/softmax.cuh"

namespace magi {

constexpr int kArrivalsAt = 4;     // int32 words into the workspace
constexpr int kPartialsAt = 1024;  // int32 words into the workspace

// Floats of one warpgroup's part: the output, then reference and sum of both rows, each thread's
// values apart.
template <typename C>
__host__ __device__ constexpr int64_t partial_floats() {
  return 128 * (C::kDv / 2 + 4);
}

// Leaves this part in the workspace. True for the part that came last: then o and state hold the
// whole.
template <typename C>
__device__ __forceinline__ bool combine_splits(const FwdKernelParams& p, float (&o)[C::kDv / 2],
                                               SoftmaxState<C>& state, int work_tile, Part part,
                                               int group) {
  const int thread = threadIdx.x % 128, slot = C::kGroups * work_tile + group;
  // In float2. There are kMostSplitWork parts at most, so 32 bits do.
  constexpr int kStride = partial_floats<C>() / 2, kStats = 128 * (C::kDv / 4);
  float2* all = reinterpret_cast<float2*>(p.partials);
  const int first = slot * p.max_parts * kStride + thread;
  const int mine = first + part.index * kStride;
#pragma unroll
  for (int i = 0; i < C::kDv / 4; ++i) all[mine + 128 * i] = make_float2(o[2 * i], o[2 * i + 1]);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    all[mine + kStats + 128 * r] = make_float2(state.reference[r], state.sum[r]);
  __threadfence();
  named_barrier(1 + group, 128);
  bool last = false;
  if (thread == 0) {
    int32_t* arrivals = p.workspace + kArrivalsAt + slot;
    last = atomicAdd(arrivals, 1) == part.count - 1;
    if (last) *arrivals = 0;
    __threadfence();
  }
  if (!any_at_barrier(1 + group, 128, last)) return false;
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      top[r] = fmaxf(top[r], load_shared_by_all(all + first + i * kStride + kStats + 128 * r).x);
  }
  state.reset();
#pragma unroll
  for (int i = 0; i < C::kDv / 2; ++i) o[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) {
    const float2* at = all + first + i * kStride;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 stats = load_shared_by_all(at + kStats + 128 * r);
      factor[r] = top[r] == -INFINITY ? 0.f : exp2_fast(stats.x - top[r]);
      state.sum[r] += stats.y * factor[r];
    }
#pragma unroll
    for (int j = 0; j < C::kDv / 4; ++j) {
      const float2 x = load_shared_by_all(at + 128 * j);
      o[2 * j] += x.x * factor[j % 2];
      o[2 * j + 1] += x.y * factor[j % 2];
    }
  }
  state.reference[0] = top[0];
  state.reference[1] = top[1];
  return true;
}

}  // namespace magi
