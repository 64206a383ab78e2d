// SPDX-License-Identifier: Apache-2.0
// Forward of block lists for sm_90a: the dense forward, whose key blocks are those of a list. The
// keys of a step are one block or several, or a part of one.
#pragma once

#include "ffa/sm90/fwd/kernel.cuh"
#include "ffa/sm90/index/fwd/blocks/block_iter.cuh"
#include "ffa/sm90/index/fwd/blocks/producer.cuh"

namespace magi {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    index_fwd_blocks(const __grid_constant__ IndexBlocksParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const FwdSmem<C> smem(smem_addr(raw), 0);
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_maps[0]);
    prefetch_tensor_map(&p.v_maps[0]);
    prefetch_tensor_map(&p.out_map);
  }
  __syncthreads();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_lists<C>(p, smem);
    if (threadIdx.x == 32) schedule_lists<C>(p, smem);
  } else {
    registers_grow<C::kConsumerRegisters>();
    compute<C, ListIter<C>>(p, smem);
  }
}

}  // namespace magi
