// SPDX-License-Identifier: Apache-2.0
// Waiting for signals with an end, and what launchers of transfers over NVSHMEM check alike.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "ffa/common/host.h"
#include "comm/symm/signal.cuh"
#include "magi/comm.h"

namespace magi {
namespace comm {

__device__ __forceinline__ char* place(const magi_comm_epoch& e, int64_t at) {
  return static_cast<char*>(e.arena) + at;
}

__device__ __forceinline__ uint64_t* signal_word(const magi_comm_epoch& e, int64_t signal) {
  return reinterpret_cast<uint64_t*>(place(e, e.signals_at)) + signal;
}

// Epochs that are over on this rank.
__device__ __forceinline__ uint64_t* epoch_word(const magi_comm_epoch& e) {
  return reinterpret_cast<uint64_t*>(place(e, e.epoch_at));
}

// By one thread: until a signal has counted so many. `wait` is a row of a table.
__device__ __forceinline__ void wait_for(const magi_comm_epoch& e, const int64_t* wait,
                                         uint64_t epochs) {
  const uint64_t count = epochs * static_cast<uint64_t>(wait[1]);
  uint64_t* word = signal_word(e, wait[0]);
  const uint32_t begun = milliseconds();
  uint32_t last = begun;
#pragma unroll 1
  while (nvshmem_signal_fetch(word) < count) {
    __nanosleep(kLookEveryNs);
    const uint32_t now = milliseconds();
    if (now == last) continue;
    last = now;
    if (has_failed(e.timeout_ms, e.failed_peer, static_cast<int>(wait[2]), now - begun)) return;
  }
}

// By a CTA: until all of them have.
__device__ __forceinline__ void wait_for_all(const magi_comm_epoch& e, const int64_t* waits,
                                             int64_t count, uint64_t epochs) {
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    wait_for(e, waits + i * MAGI_COMM_WAIT_WORDS, epochs);
  __threadfence_system();
  __syncthreads();
}

// By a CTA, at its end: its puts have read their sources.
__device__ __forceinline__ void drain() {
  __syncthreads();
  if (threadIdx.x == 0) nvshmem_quiet();
}

}  // namespace comm
}  // namespace magi

extern "C" {
// By nvshmem.cu: whether this process has joined, and whether the caller's header is this one.
magi_status magi_comm_check(int32_t version);
}
