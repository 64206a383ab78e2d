// SPDX-License-Identifier: Apache-2.0
// The wait before rows are copied out of a box: a kernel of its own, launched by magi_box_take.
#pragma once

#include "box.cuh"

namespace magi {
inline namespace box_awaiting {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kAwaitThreads = 256;

// One CTA: until all slots of the pieces have arrived. Copying beside what still arrives would slow that down by half.
__global__ void __launch_bounds__(kAwaitThreads) box_await(const __grid_constant__ magi_box_take_params p) {
  extern __shared__ int is_wanted[];
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  const int slots = MAGI_BOX_GROUPS * p.world;
  for (int slot = threadIdx.x; slot < slots; slot += kAwaitThreads) is_wanted[slot] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_pieces; i += kAwaitThreads) is_wanted[__ldg(p.pieces + 4 * i)] = 1;
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += kAwaitThreads)
    if (is_wanted[slot])
      wait_for_word(box_word(p.box.own, MAGI_BOX_ARRIVED(p.world, slot)), use, p.timeout_ms, p.failure, slot / MAGI_BOX_GROUPS);
}

}  // namespace box_awaiting
}  // namespace magi
