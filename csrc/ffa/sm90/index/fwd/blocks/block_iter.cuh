// SPDX-License-Identifier: Apache-2.0
// How a consumer warpgroup iterates over the steps of a list, see fwd/block_iter.cuh.
#pragma once

#include "ffa/common/softmax.cuh"
#include "ffa/sm90/fwd/producer.cuh"

namespace magi {

// All rows of a tile see all keys of its list, so only the last step can need a mask.
template <typename C>
struct ListIter {
  const FwdSmem<C>& smem;
  PipelineState state;
  int left = 0;         // steps from this one on
  int masked_left = 0;  // 1 where the last step is not full

  __device__ __forceinline__ ListIter(const FwdKernelParams&, const FwdSmem<C>& s) : smem(s) {}

  __device__ __forceinline__ uint32_t work_stage() const { return state.work_stage(); }
  __device__ __forceinline__ uint32_t work_phase() const { return state.work_phase(); }
  __device__ __forceinline__ void next_work() { state.next_work(); }

  __device__ __forceinline__ int last_keys() const {
    return uniform(lds_int(smem.work_tile(work_stage()) + 12));
  }
  __device__ __forceinline__ void start(int steps) {
    left = steps;
    masked_left = last_keys() < C::kBlockN;
  }
  __device__ __forceinline__ bool has_work() const { return left > 0; }
  __device__ __forceinline__ bool masked() const { return left == masked_left; }
  __device__ __forceinline__ void step() { --left; }
  __device__ __forceinline__ void next_segment() {}  // a list is one segment

  __device__ __forceinline__ void mask(float (&s)[C::kBlockN / 2]) const {
    const int2 seen = make_int2(0, last_keys());
    const int2 keys[2] = {seen, seen};
    mask_scores<C::kBlockN>(s, 0, keys, thread_again() % 32);
  }
};

}  // namespace magi
