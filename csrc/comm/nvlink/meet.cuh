// SPDX-License-Identifier: Apache-2.0
// Where ranks meet before the sum of what they wrote into each other's boxes: launched by magi_box_reduce.
#pragma once

#include "box.cuh"

namespace magi {
inline namespace box_meeting {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kMeetThreads = 128;

// One CTA: tells the others that what was written into their boxes is there, then waits for theirs. A kernel of its own, because
// looks from all multiprocessors were in the way of what still arrived (when each wait began with a look at host memory).
__global__ void __launch_bounds__(kMeetThreads) box_meet(const __grid_constant__ magi_box_reduce_params p) {
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  for (int peer = threadIdx.x; peer < p.world; peer += blockDim.x)
    if (peer != p.rank) store_release_system(box_word(p.box.of_rank[peer], MAGI_BOX_ARRIVED(p.world, p.rank)), use);
  for (int peer = threadIdx.x; peer < p.world; peer += blockDim.x)
    if (peer != p.rank && p.senders[peer])
      wait_for_word(box_word(p.box.own, MAGI_BOX_ARRIVED(p.world, peer)), use, p.timeout_ms, p.failure, peer);
}

}  // namespace box_meeting
}  // namespace magi
