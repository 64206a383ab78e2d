// SPDX-License-Identifier: Apache-2.0
// What a backward of index attention knows of a query row beside q and dout.
#pragma once

#include "device/shared.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/index/bwd/params.h"

namespace magi {

// A thread brings lse and delta of its row to shared memory. A row that there is not gets weights
// of 0 by an lse of infinity.
template <typename Smem>
__device__ __forceinline__ void load_row_stats(const IndexBwdParams& p, const Smem& smem,
                                               const QueryRow& row) {
  const int64_t at = static_cast<int64_t>(row.token) * p.work.heads_q + row.head;
  const uint32_t to = 4 * threadIdx.x;
  sts_int(smem.lse() + to, __float_as_int(row.exists ? __ldg(p.lse + at) * kLog2e : INFINITY));
  sts_int(smem.delta() + to, __float_as_int(row.exists ? __ldg(p.delta + at) : 0.f));
}

}  // namespace magi
