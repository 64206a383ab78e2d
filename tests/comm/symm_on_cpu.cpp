// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/comm/symm on the CPU, see tests/kernels/emulator/README.md.
// symm_library.py writes the folder of .cu files that are included here: without launchers. Each
// function gives NULL, or what a kernel did wrong.
#include "cuda_runtime.h"
#include "device/tma.cuh"

using cudaEvent_t = void*;  // launchers, which are compiled and not called, record some
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

#include "comm/symm/put.cu"
#include "comm/symm/unpack.cu"
#include "comm/symm/recv_reduce.cu"
#include "comm/symm/reduce.cu"
#include "comm/symm/barrier.cuh"

namespace {

using namespace magi;

template <typename P>
const char* run(void (*kernel)(P), const P& params, int ctas, int threads, uint32_t smem) {
  static uint64_t seed = 0;
  return hopper::error_of(
      [&] { hopper::run_grid(ctas, threads, smem, kernel, params, ++seed, ctas); });
}

struct PutBuffer {
  magi_symm_buffer buffer;
  int rank, world;
  uint32_t timeout_ms;
  int32_t* failed_peer;
};

// As a thread of the forward of attention does it.
__global__ void release_alone(const PutBuffer p) {
  if (threadIdx.x == 0)
    release_put_buffer_alone(p.buffer, p.rank, p.world, p.timeout_ms, p.failed_peer);
}

struct AllRanks {
  const magi_symm_reduce_params* reduces;
  const int32_t* const* senders;
};

// All ranks, which wait for each other, by a CTA of each.
__global__ void meet(const AllRanks all) {
  const magi_symm_reduce_params& p = all.reduces[blockIdx.x];
  rank_barrier({p.buffer, all.senders[blockIdx.x], p.failed_peer, p.rank, p.world, p.timeout_ms});
}

}  // namespace

extern "C" {
int64_t control_bytes(int32_t world) {
  return (MAGI_SYMM_NEXT_TRANSFER(world) + 1) * static_cast<int64_t>(MAGI_SYMM_WORD_BYTES);
}
const char* put(const magi_symm_put_params* p) {
  return run(symm_put, *p, p->num_ctas, kMoveThreads, kPutSmem);
}
const char* unpack(const magi_symm_unpack_params* p) {
  return run(symm_unpack, *p, p->num_ctas, kMoveThreads, kUnpackSmem);
}
const char* recv_reduce(const magi_symm_recv_reduce_params* p) {
  return run(symm_recv_reduce, *p, p->num_ctas, kRecvReduceThreads, 4 * p->world);
}
const char* release(const magi_symm_buffer* buffer, int rank, int world, uint32_t timeout_ms,
                    int32_t* failed_peer) {
  return run(release_alone, PutBuffer{*buffer, rank, world, timeout_ms, failed_peer}, 1, 32, 0);
}
const char* rank_barrier(const magi_symm_reduce_params* all, const int32_t* const* senders,
                         int world) {
  return run(meet, AllRanks{all, senders}, world, 32, 0);
}
const char* reduce(const magi_symm_reduce_params* p, int ctas) {
  return run(symm_reduce, *p, ctas, kReduceThreads, 0);
}
}
