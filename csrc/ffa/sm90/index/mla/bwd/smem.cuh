// SPDX-License-Identifier: Apache-2.0
// Shared memory of the backward of index attention in MLA's form.
#pragma once

#include "ffa/sm90/index/mla/bwd/config.h"
#include "device/mbarrier.cuh"

namespace magi {

template <typename C>
struct MlaBwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q() const { return base + C::kQAt; }
  __device__ uint32_t dout() const { return base + C::kDoutAt; }
  __device__ uint32_t k() const { return base + C::kKAt; }
  __device__ uint32_t p() const { return base + C::kPAt; }
  __device__ uint32_t ds() const { return base + C::kDsAt; }
  __device__ uint32_t lse() const { return base + C::kLseAt; }
  __device__ uint32_t delta() const { return base + C::kDeltaAt; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full() const { return bar(0); }  // dout, lse and delta are there, too
  __device__ uint32_t q_empty() const { return bar(1); }
  __device__ uint32_t p_full() const { return bar(2); }
  __device__ uint32_t ds_full() const { return bar(3); }
  __device__ uint32_t weights_empty() const { return bar(4); }  // P and dS
  __device__ uint32_t q_unused() const { return bar(5); }  // by both warpgroups: dq may be staged
  __device__ uint32_t k_full(int part) const { return bar(6 + part); }
  __device__ uint32_t k_empty(int part) const { return bar(6 + C::kParts + part); }

  __device__ void init_barriers() const {
    mbar_init(q_full(), C::kProducers + 1);
    mbar_init(q_empty(), 2);
    mbar_init(q_unused(), C::kConsumers / 32);
    mbar_init(p_full(), C::kGroupWarps);
    mbar_init(ds_full(), C::kGroupWarps);
    mbar_init(weights_empty(), C::kConsumers / 32);
    for (int part = 0; part < C::kParts; ++part) {
      mbar_init(k_full(part), C::kProducers);
      mbar_init(k_empty(part), C::kGroupWarps);
    }
    mbar_init_fence();
  }
};

}  // namespace magi
