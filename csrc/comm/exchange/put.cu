// SPDX-License-Identifier: Apache-2.0
// Puts of a group cast or reduce over nodes, see magi/comm.h.

#include "comm/exchange/verbs.cuh"

namespace magi {
namespace comm {

__global__ void __launch_bounds__(kCommPutThreads)
    comm_put(const __grid_constant__ magi_comm_put_params p) {
  put_all(Network(p.epoch), p);
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
