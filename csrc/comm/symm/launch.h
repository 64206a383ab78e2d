// SPDX-License-Identifier: Apache-2.0
// What every launch on a buffer checks first, and what ends one.
#pragma once

#include "ffa/common/host.h"
#include "magi/symm.h"

namespace magi {

inline magi_status check_world(int32_t version, int32_t rank, int32_t world,
                               const magi_symm_buffer& buffer) {
  if (version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", version,
                MAGI_ABI_VERSION);
  if (world < 2 || rank < 0 || rank >= world)
    return fail(MAGI_INVALID_ARGUMENT,
                "rank %d of %d: buffers need two ranks or more, numbered from 0.", rank, world);
  if (buffer.own == nullptr || buffer.of_rank == nullptr)
    return fail(MAGI_INVALID_ARGUMENT, "The buffer has no address.");
  return MAGI_OK;
}

// For calls on other streams that are to follow; `event` may be NULL.
inline magi_status record_end(void* event, void* stream) {
  if (event == nullptr) return MAGI_OK;
  return cuda_status(
      cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)),
      "recording the end of a call");
}

}  // namespace magi
