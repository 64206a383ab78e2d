// SPDX-License-Identifier: Apache-2.0
// Puts of a group cast or reduce over nodes, see magi/comm.h.

#include "comm/exchange_verbs.cuh"

namespace magi {
namespace comm {

constexpr int kCommPutThreads = 512;

// A CTA takes every gridDim.x-th put, so those that wait for nothing, which come first, are on
// their way before any CTA waits.
__global__ void __launch_bounds__(kCommPutThreads)
    comm_put(const __grid_constant__ magi_comm_put_params p) {
  const Network network(p.epoch);
  if (!wait_for_all<true>(network, p.epoch, p.credits, p.num_credits)) return;
#pragma unroll 1
  for (int i = blockIdx.x; i < p.num_puts; i += gridDim.x) {
    const int64_t* put = p.puts + static_cast<int64_t>(i) * MAGI_COMM_PUT_WORDS;
    if (put[5] >= 0 && !wait_for_all<false>(network, p.epoch, put + 5, 1)) break;
    put_rows(network, p.epoch, put[1], put[0], put[2], put[4], static_cast<int>(put[3]));
  }
  network.drain();
}

}  // namespace comm
}  // namespace magi

extern "C" magi_status magi_comm_put(const magi_comm_put_params* params) {
  const magi_comm_put_params& p = *params;
  MAGI_RETURN(magi_comm_check(p.version));
  if (p.num_puts < 0 || p.num_credits < 0 || p.num_ctas < 1)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d puts after %d credits by %d CTAs.", p.num_puts,
                      p.num_credits, p.num_ctas);
  magi::comm::
      comm_put<<<p.num_ctas, magi::comm::kCommPutThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
          p);
  return magi::cuda_status(cudaGetLastError(), "launching puts");
}
