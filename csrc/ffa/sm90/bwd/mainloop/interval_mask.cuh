// SPDX-License-Identifier: Apache-2.0
// The mask of a step by the row intervals of its segment.
#pragma once

#include "device/shared.cuh"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/smem.cuh"

namespace magi {

// Which keys see which queries of a step by the intervals of its segment.
template <typename C>
struct IntervalMask {
  static constexpr bool kLetsDkOverlap = true;  // see StepWorker
  static __device__ __forceinline__ void apply(const BwdSmem<C>& smem, uint32_t stage, int what,
                                               float (&s)[C::kBlockM / 2]) {
    const int thread = thread_again() - 128;
    const int first_query = lds_int(smem.step(stage) + 4);
    const uint32_t at = smem.segment(what >> kSegmentStageBit & 1) + C::kSegmentHeader +
                        8 * (thread / 32 * 16 + thread % 32 / 4);
    const int2 queries[2] = {lds_int2(at), lds_int2(at + 64)};
    mask_scores<C::kBlockM>(s, first_query, queries, thread % 32);
  }
};

}  // namespace magi
