// SPDX-License-Identifier: Apache-2.0
// Keys that other ranks push while the kernel runs: where they are, and waiting for them. See magi_ffa_remote.
#pragma once

#include <cuda.h>

#include "../../comm/nvlink/box.cuh"
#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/copy.cuh"

namespace magi {

constexpr int kRemoteTile = 128;  // keys

struct RemoteKeys {
  CUtensorMap k_map, v_map;  // (d, row, kv head)
  int32_t base;              // of remote keys in the coordinates of the plan; INT_MAX: there are none
  int32_t local_keys;        // before them
  int32_t rank, world, num_slots;
  uint32_t timeout_ms;
  magi_box box;
  const int32_t* arrivals;
  int32_t* failure;
  // Backward only.
  const int32_t *owners, *target_rows;
  const int64_t *dk_targets, *dv_targets;
  const int32_t* summed;  // NULL where there are no such keys
  float *dk_sums, *dv_sums;
  int32_t wire_is_float;
};

// Which of the tiles that other ranks add to, whose gradients are summed in float32; -1: none, it is this rank's alone.
__device__ __forceinline__ int summed_tile(const RemoteKeys& r, int tile) {
  return r.summed == nullptr || tile * kRemoteTile >= r.local_keys ? -1 : __ldg(r.summed + tile);
}

__device__ __forceinline__ void wait_for_slot(const RemoteKeys& r, int slot) {
  const uint32_t use = *reinterpret_cast<const volatile uint32_t*>(box_word(r.box.own, MAGI_BOX_USES)) + 1;
  wait_for_word(box_word(r.box.own, MAGI_BOX_ARRIVED(r.world, slot)), use, r.timeout_ms, r.failure, MAGI_BOX_SLOT_CULPRIT + slot);
}

// Until the tile's rows are there, for bulk copies of this thread too.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile) {
  wait_for_slot(r, __ldg(r.arrivals + tile));
  fence_proxies();
}

// The same. The slots before `next` are known to have arrived; those up to the tile's are waited for in order.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile, int& next) {
  if (next == r.num_slots) return;
  const int slot = __ldg(r.arrivals + tile);
  if (slot < next) return;
  while (next <= slot) wait_for_slot(r, next++);
  fence_proxies();
}

// By a thread of each CTA, when that will read no more remote keys: the last of them ends the use of the box. `count` is 0 between kernels.
__device__ __forceinline__ void end_remote_keys(const RemoteKeys& r, int32_t* count) {
  if (r.box.of_rank == nullptr) return;
  __threadfence();
  if (atomicAdd(count, 1) + 1 != gridDim.x) return;
  *count = 0;
  __threadfence_system();
  release_pushed_box_alone(r.box, r.rank, r.world, r.timeout_ms, r.failure);
}

}  // namespace magi
