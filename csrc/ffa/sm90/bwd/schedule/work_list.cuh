// SPDX-License-Identifier: Apache-2.0
// How kernels read the work list of a call, which the host has made (magi/schedule.h).
#pragma once

#include "magi/schedule.h"
#include "ffa/sm90/bwd/config.h"

namespace magi {

__device__ __forceinline__ const magi_work_list& work_list_header(const int32_t* list) {
  return *reinterpret_cast<const magi_work_list*>(list);
}

// A magi_work_tile, but for num_splits, which the kernel knows.
struct ListedWorkTile {
  int tile, head, split, m_begin, m_end, num_descending, partial;
};

// `rows`: of magi_work_tile, at a multiple of 16 bytes.
__device__ __forceinline__ ListedWorkTile listed_work_tile(const int32_t* rows, int i) {
  const int4 *at = reinterpret_cast<const int4*>(rows) + 2 * i, a = __ldg(at), b = __ldg(at + 1);
  return {a.x, a.y, a.z, b.x, b.y, b.z, b.w};
}

}  // namespace magi
