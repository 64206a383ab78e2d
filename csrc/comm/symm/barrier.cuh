// SPDX-License-Identifier: Apache-2.0
// Where ranks meet before they add up what they wrote into each other's buffers: at the end of the
// last kernel of a backward.
#pragma once

#include "comm/symm/signal.cuh"

namespace magi {

struct RankBarrier {
  magi_symm_buffer buffer;  // own is NULL where there are no other ranks
  const int32_t* senders;   // (world,) 1 if that rank adds anything here
  int32_t* failed_peer;
  int32_t rank, world;
  uint32_t timeout_ms;
};

// By one CTA: tells the others that what kernels before this one wrote into their buffers is there,
// then waits for theirs. One, because looks from all multiprocessors were in the way of what still
// arrived (when each wait began with a look at host memory), and because CTAs that wait for other
// ranks must not hold all of them.
__device__ __forceinline__ void rank_barrier(const RankBarrier& m) {
  if (m.buffer.own == nullptr) return;
  const uint32_t epoch = *symm_word(m.buffer.own, MAGI_SYMM_EPOCH) + 1;
  for (int peer = threadIdx.x; peer < m.world; peer += blockDim.x)
    if (peer != m.rank)
      store_release_system(symm_word(m.buffer.of_rank[peer], MAGI_SYMM_SIGNAL(m.world, m.rank)),
                           epoch);
  for (int peer = threadIdx.x; peer < m.world; peer += blockDim.x)
    if (peer != m.rank && m.senders[peer])
      wait_for_word(symm_word(m.buffer.own, MAGI_SYMM_SIGNAL(m.world, peer)), epoch, m.timeout_ms,
                    m.failed_peer, peer);
}

}  // namespace magi
