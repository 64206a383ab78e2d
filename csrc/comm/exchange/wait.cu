// SPDX-License-Identifier: Apache-2.0
// A stream that waits for signals of an exchange over nodes, see magi/comm.h.

#include "comm/exchange/verbs.cuh"

namespace magi {
namespace comm {

constexpr int kCommWaitThreads = 64;

__global__ void __launch_bounds__(kCommWaitThreads)
    comm_wait(const __grid_constant__ magi_comm_wait_params p) {
  wait_for_all<false>(Network(p.epoch), p.epoch, p.waits, p.num_waits);
}

}  // namespace comm
}  // namespace magi

extern "C" magi_status magi_comm_wait(const magi_comm_wait_params* params) {
  const magi_comm_wait_params& p = *params;
  MAGI_RETURN(magi_comm_check(p.version));
  if (p.num_waits < 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d waits; give 0 or more.", p.num_waits);
  magi::comm::
      comm_wait<<<1, magi::comm::kCommWaitThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching waits");
}
