// SPDX-License-Identifier: Apache-2.0
// How kernels read the work list of a call, which the host has made (magi/schedule.h).
#pragma once

#include "magi/schedule.h"
#include "ffa/sm90/bwd/config.h"

namespace magi {

__device__ __forceinline__ const magi_work_list& work_list_header(const int32_t* list) {
  return *reinterpret_cast<const magi_work_list*>(list);
}

}  // namespace magi
