// SPDX-License-Identifier: Apache-2.0
// The attention kernels for Hopper beside keys that arrive, on the CPU, see
// tests/kernels/emulator/README.md: forward, backward, and the sum of what other ranks add.
// test_one_launch_nodes.py writes symm_reduce.cuh, the kernel of that sum without its launcher.
#define MAGI_VARIANTS_ON_CPU      \
  MAGI_VARIANT(fwd, bf16, 64, 64) \
  MAGI_VARIANT(bwd, bf16, 64, 64)

#include "device_calls.h"

using cudaEvent_t = void*;
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

#include "ffa/common/dispatch.cu"
#include "ffa/common/host.cu"
#include "ffa/sm90/bwd/launch.cuh"
#include "ffa/sm90/fwd/launch.cuh"
#include "ffa/sm90/remote.cu"
#include "ffa/sm90/tiles.cu"
#include "symm_reduce.cuh"

MAGI_FFA_INSTANCE(fwd, magi::bf16, 64, 64)
MAGI_FFA_INSTANCE(bwd, magi::bf16, 64, 64)

extern "C" {
magi_status magi_symm_put(const magi_symm_put_params*) {
  return magi::fail(MAGI_UNSUPPORTED, "Rows travel by an exchange here.");
}
magi_status magi_symm_reduce(const magi_symm_reduce_params* p) {
  MAGI_RETURN(magi::check_world(p->version, p->rank, p->world, p->buffer));
  return magi::launch_kernel(magi::symm_reduce, dim3(2), magi::kReduceThreads, 0, p->stream, *p,
                             "the sum of rows");
}
}
