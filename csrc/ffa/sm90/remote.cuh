// SPDX-License-Identifier: Apache-2.0
// Keys that other ranks push while the kernel runs: where they are, and waiting for them. See magi_ffa_remote.
#pragma once

#include <cuda.h>

#include "../../comm/nvlink/box.cuh"
#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"

namespace magi {

constexpr int kRemoteTile = 128;  // keys

struct RemoteKeys {
  CUtensorMap k_map, v_map;  // (d, row, kv head)
  int32_t base;              // of remote keys in the coordinates of the plan; INT_MAX: there are none
  int32_t local_keys;        // before them
  int32_t world;
  uint32_t timeout_ms;
  const void* box;
  const int32_t* owners;
  int32_t* failure;
  // Backward only.
  const int32_t* target_rows;
  const int64_t *dk_targets, *dv_targets;
  int32_t wire_is_float;
};

// Until the tile's rows are there, for bulk copies of this thread too.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile) {
  const int owner = __ldg(r.owners + tile);
  const uint32_t use = *reinterpret_cast<const volatile uint32_t*>(box_word(r.box, MAGI_BOX_USES(r.world))) + 1;
  wait_for_word(box_word(r.box, MAGI_BOX_ARRIVED(r.world, owner)), use, r.timeout_ms, r.failure, owner);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// The same. `here` are the owners, of the first 32, that are known to be through.
__device__ __forceinline__ void wait_for_tile(const RemoteKeys& r, int tile, uint32_t& here) {
  const int owner = __ldg(r.owners + tile);
  const uint32_t bit = owner < 32 ? 1u << owner : 0;
  if (here & bit) return;
  wait_for_tile(r, tile);
  here |= bit;
}

}  // namespace magi
