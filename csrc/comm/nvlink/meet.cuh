// SPDX-License-Identifier: Apache-2.0
// Where ranks meet before they add up what they wrote into each other's boxes: at the end of the last kernel of a backward.
#pragma once

#include "box.cuh"

namespace magi {

struct Meeting {
  magi_box box;            // own is NULL where there are no other ranks
  const int32_t* senders;  // (world,) 1 if that rank adds anything here
  int32_t* failure;
  int32_t rank, world;
  uint32_t timeout_ms;
};

// By one CTA: tells the others that what kernels before this one wrote into their boxes is there, then waits for theirs. One, because looks from
// all multiprocessors were in the way of what still arrived (when each wait began with a look at host memory), and because CTAs that wait for
// other ranks must not hold all of them.
__device__ __forceinline__ void meet_ranks(const Meeting& m) {
  if (m.box.own == nullptr) return;
  const uint32_t use = *box_word(m.box.own, MAGI_BOX_USES) + 1;
  for (int peer = threadIdx.x; peer < m.world; peer += blockDim.x)
    if (peer != m.rank) store_release_system(box_word(m.box.of_rank[peer], MAGI_BOX_ARRIVED(m.world, m.rank)), use);
  for (int peer = threadIdx.x; peer < m.world; peer += blockDim.x)
    if (peer != m.rank && m.senders[peer]) wait_for_word(box_word(m.box.own, MAGI_BOX_ARRIVED(m.world, peer)), use, m.timeout_ms, m.failure, peer);
}

}  // namespace magi
