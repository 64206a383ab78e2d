// SPDX-License-Identifier: Apache-2.0
// Shared memory of the forward of index attention.
#pragma once

#include "ffa/sm90/index/fwd/config.h"
#include "device/mbarrier.cuh"

namespace magi {

template <typename C>
struct IndexFwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q(uint32_t s) const { return base + C::kQAt + s * C::kQBytes; }
  __device__ uint32_t k(uint32_t s) const { return base + C::kKAt + s * C::kKBytes; }
  __device__ uint32_t v(uint32_t s) const { return base + C::kVAt + s * C::kVBytes; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full(uint32_t s) const { return bar(0 + s); }
  __device__ uint32_t q_empty(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t v_full(uint32_t s) const { return bar(8 + s); }
  __device__ uint32_t v_empty(uint32_t s) const { return bar(11 + s); }

  __device__ void init_barriers() const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(q_full(s), 1);
      mbar_init(q_empty(s), C::kGroups);
      mbar_init(k_full(s), C::kProducers);
      mbar_init(k_empty(s), C::kConsumerWarps);
    }
    for (uint32_t s = 0; s < C::kVStages; ++s) {
      mbar_init(v_full(s), C::kProducers);
      mbar_init(v_empty(s), C::kConsumerWarps);
    }
    mbar_init_fence();
  }
};

}  // namespace magi
