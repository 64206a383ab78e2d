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

// The same, and the number of tensors.
template <typename Params>
magi_status check_call(const Params& p) {
  MAGI_RETURN(check_world(p.version, p.rank, p.world, p.buffer));
  if (p.num_tensors < 1 || p.num_tensors > MAGI_SYMM_TENSORS)
    return fail(MAGI_INVALID_ARGUMENT, "%d tensors; give 1 to %d.", p.num_tensors,
                MAGI_SYMM_TENSORS);
  return MAGI_OK;
}

inline magi_status check_ctas(int32_t num_ctas) {
  if (num_ctas >= 1) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT, "%d CTAs; give one or more.", num_ctas);
}

// The same for a call that moves rows as they are; `strides` and `addresses` are those of the
// caller's side.
template <typename Params, typename Address>
magi_status check_moved_rows(const Params& p, const int64_t* strides, const Address* addresses) {
  MAGI_RETURN(check_call(p));
  MAGI_RETURN(check_ctas(p.num_ctas));
  for (int t = 0; t < p.num_tensors; ++t)
    if (p.row_bytes[t] % 16 || strides[t] % 16 || p.data_at[t] % 16 ||
        reinterpret_cast<uintptr_t>(addresses[t]) % 16)
      return fail(MAGI_INVALID_ARGUMENT,
                  "Rows of tensor %d do not begin and end at multiples of 16 bytes.", t);
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
