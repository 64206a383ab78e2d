// SPDX-License-Identifier: Apache-2.0
// Keys that other ranks put while the kernel runs: where they are, and waiting for them. See
// magi_ffa_remote.
#pragma once

#include <cuda.h>

#include "comm/symm/signal.cuh"
#include "magi/abi.h"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"

namespace magi {

constexpr int kRemoteTile = 128;  // keys

struct RemoteKeys {
  CUtensorMap k_map, v_map;  // (d, row, kv head)
  int32_t base;        // of remote keys in the coordinates of the plan; INT_MAX: there are none
  int32_t local_keys;  // before them
  int32_t rank, world, num_signals;
  uint32_t timeout_ms;
  magi_symm_buffer buffer;
  const int32_t* arrivals;
  int32_t* failed_peer;
  // Backward only.
  const int32_t *owners, *target_rows;
  const int64_t *dk_targets, *dv_targets;
  const int32_t* summed;  // NULL where there are no such keys
  float *dk_sums, *dv_sums;
  int32_t wire_is_float;
};

// Which of the tiles that other ranks add to, whose gradients are summed in float32; -1: none, it
// is this rank's alone.
__device__ __forceinline__ int summed_tile(const RemoteKeys& r, int tile) {
  return r.summed == nullptr || tile * kRemoteTile >= r.local_keys ? -1 : __ldg(r.summed + tile);
}

__device__ __forceinline__ void wait_for_signal(const RemoteKeys& r, int signal) {
  const uint32_t epoch =
      *reinterpret_cast<const volatile uint32_t*>(symm_word(r.buffer.own, MAGI_SYMM_EPOCH)) + 1;
  wait_for_word(symm_word(r.buffer.own, MAGI_SYMM_SIGNAL(r.world, signal)), epoch, r.timeout_ms,
                r.failed_peer, MAGI_SYMM_FAILED_SIGNAL + signal);
}

// Until the tile's rows are there, for bulk copies of this thread too.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile) {
  wait_for_signal(r, __ldg(r.arrivals + tile));
  fence_proxies();
}

// The same. The signals before `next` are known to have arrived; those up to the tile's are waited
// for in order.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile, int& next) {
  if (next == r.num_signals) return;
  const int signal = __ldg(r.arrivals + tile);
  if (signal < next) return;
  while (next <= signal) wait_for_signal(r, next++);
  fence_proxies();
}

// By a thread of each CTA, when that will read no more remote keys: the last of them ends the epoch
// of the buffer. `count` is 0 between kernels.
__device__ __forceinline__ void end_peer_kv(const RemoteKeys& r, int32_t* count) {
  if (r.buffer.of_rank == nullptr) return;
  __threadfence();
  if (atomicAdd(count, 1) + 1 != gridDim.x) return;
  *count = 0;
  __threadfence_system();
  release_put_buffer_alone(r.buffer, r.rank, r.world, r.timeout_ms, r.failed_peer);
}

}  // namespace magi
