// SPDX-License-Identifier: Apache-2.0
// Shared memory of the backward of index attention.
#pragma once

#include "ffa/sm90/index/bwd/config.h"
#include "device/mbarrier.cuh"

namespace magi {

template <typename C>
struct IndexBwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q() const { return base + C::kQAt; }
  __device__ uint32_t dout() const { return base + C::kDoutAt; }
  __device__ uint32_t k(uint32_t s) const { return base + C::kKAt + s * C::kKBytes; }
  __device__ uint32_t v(uint32_t s) const { return base + C::kVAt + s * C::kKBytes; }
  __device__ uint32_t ds() const { return base + C::kDsAt; }
  __device__ uint32_t lse() const { return base + C::kLseAt; }
  __device__ uint32_t delta() const { return base + C::kDeltaAt; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full() const { return bar(0); }  // dout, lse and delta are there, too
  __device__ uint32_t q_empty() const { return bar(1); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t v_full(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t v_empty(uint32_t s) const { return bar(8 + s); }

  __device__ void init_barriers() const {
    mbar_init(q_full(), C::kProducers + 1);
    mbar_init(q_empty(), 1);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(k_full(s), C::kProducers);
      mbar_init(k_empty(s), C::kConsumerWarps);
      mbar_init(v_full(s), C::kProducers);
      mbar_init(v_empty(s), C::kConsumerWarps);
    }
    mbar_init_fence();
  }
};

}  // namespace magi
