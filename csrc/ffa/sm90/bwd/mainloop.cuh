// SPDX-License-Identifier: Apache-2.0
// The main loop of the backward kernel: a consumer warpgroup iterates over the steps of a work
// tile. A step is one block of queries of one head. The producer lane has described it in shared
// memory.
//
// The scores are transposed: rows are the warpgroup's 64 keys, columns the queries of the step. So
// P and dS come out of the registers as the A operands of dV and dK; only dq, which needs all keys,
// takes dS from shared memory.
//
// A variant of the kernel has one kind of step for dk and dq, and mostly dv: `step` of 64 queries,
// `step_wide` of 80 or 128 (C::kIsWide), or `step_tight`, where registers have no room for two
// products at a time beside dk and dv (C::kIsTight). With two passes (C::kPasses) it has `step_dv`,
// too, for the pass that makes dv alone. All of them are members of StepWorker.
#pragma once

#include "ffa/sm90/bwd/mainloop/step.cuh"
#include "ffa/sm90/bwd/mainloop/step_dv.cuh"
#include "ffa/sm90/bwd/mainloop/step_tight.cuh"
#include "ffa/sm90/bwd/mainloop/step_wide.cuh"

namespace magi {

// The steps of a work tile, for dk, dv and dq.
template <typename C, typename Dk, typename Dv>
__device__ __forceinline__ void walk_steps(StepWorker<C>& worker, Dk& dk, Dv& dv) {
  mbar_wait(worker.smem.q_full(worker.ring.stage),
            worker.ring.phase);  // the words of the step come before it
  if constexpr (C::kIsWide) {
    __syncwarp();
    uint32_t keys = worker.rows_of(worker.smem.k());
    while (worker.step_wide(dk, dv, keys)) {
    }
  } else if constexpr (C::kIsTight) {
    while (worker.step_tight(dk, dv)) {
    }
  } else {
    typename StepWorker<C>::DqRest rest;
#pragma unroll
    for (int i = 0; i < DqColumns<C>::kRest; ++i) rest[i] = 0.f;
    uint32_t rest_of =
        C::kDirectDq ? worker.dq_block() : 0;  // nothing yet, but an address is needed
    while (worker.step(dk, dv, rest, rest_of)) {
    }
    if constexpr (C::kDirectDq) worker.columns().add_rest(rest, rest_of);
  }
}

}  // namespace magi
