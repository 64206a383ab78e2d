// SPDX-License-Identifier: Apache-2.0
// How a kernel of index attention with a producer warpgroup begins.
#pragma once

#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"

namespace magi {

// Shared memory. Thread 0 initializes its barriers and prefetches the tensor maps, so that a
// __syncthreads has to follow.
template <typename Smem, typename... Maps>
__device__ __forceinline__ Smem make_smem(const Maps&... maps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const Smem smem{smem_addr(raw)};
  if (threadIdx.x == 0) {
    smem.init_barriers();
    (prefetch_tensor_map(&maps), ...);
  }
  return smem;
}

// The first C::kProducers threads produce and give registers to the others, which consume.
template <typename C, typename Produce, typename Consume>
__device__ __forceinline__ void split_roles(const Produce& produce, const Consume& consume) {
  if (threadIdx.x < C::kProducers) {
    registers_shrink<C::kProducerRegisters>();
    produce();
  } else {
    registers_grow<C::kConsumerRegisters>();
    consume();
  }
}

}  // namespace magi
