// SPDX-License-Identifier: Apache-2.0
// The end of an epoch of an exchange over nodes, see magi/comm.h.

#include "comm/exchange/verbs.cuh"

namespace magi {
namespace comm {

constexpr int kCommEndThreads = 64;

__global__ void __launch_bounds__(kCommEndThreads)
    comm_end(const __grid_constant__ magi_comm_end_params p) {
  if (*void_word(p.epoch) != 0) return;
  const Network network(p.epoch);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_counted; i += blockDim.x) {
    const int64_t* counted = p.counted + static_cast<int64_t>(i) * MAGI_COMM_WAIT_WORDS;
    *total_word(p.epoch, counted[0]) += counted[1];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_ranks; i += blockDim.x)
    network.add(signal_at(p.epoch, p.signal), static_cast<int>(p.ranks[i]));
  if (threadIdx.x == 0) *epoch_word(p.epoch) += 1;
}

}  // namespace comm
}  // namespace magi

extern "C" magi_status magi_comm_end(const magi_comm_end_params* params) {
  const magi_comm_end_params& p = *params;
  MAGI_RETURN(magi_comm_check(p.version));
  if (p.num_ranks < 0 || p.num_counted < 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d ranks and %d signals; give 0 or more.",
                      p.num_ranks, p.num_counted);
  magi::comm::comm_end<<<1, magi::comm::kCommEndThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p);
  return magi::cuda_status(cudaGetLastError(), "ending an epoch");
}
