// SPDX-License-Identifier: Apache-2.0
// Rounds the dq of the key-stationary backward.
#pragma once

#include "ffa/sm90/bwd/rows/postprocess.cuh"

namespace magi {

// One CTA per head and block of queries.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 3) index_round_dq(const BwdRowParams p) {
  wait_for_kernel_before();
  postprocess_block<T, kBlockM64>(p, blockIdx.x, blockIdx.y, p.grad_scale, [] {});
}

}  // namespace magi
