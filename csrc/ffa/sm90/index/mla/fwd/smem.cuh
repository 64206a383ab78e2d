// SPDX-License-Identifier: Apache-2.0
// Shared memory of the forward of index attention in MLA's form.
#pragma once

#include "ffa/sm90/index/mla/fwd/config.h"
#include "device/mbarrier.cuh"

namespace magi {

// Stage s holds the blocks of consumer warpgroup s.
template <typename C>
struct MlaFwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q() const { return base + C::kQAt; }
  __device__ uint32_t k(uint32_t s) const { return base + C::kKAt + s * C::kTileBytes; }
  __device__ uint32_t values(uint32_t s, uint32_t group) const {
    return k(s) + C::part_begin(group) * C::kAtomBytes;
  }
  __device__ uint32_t p(uint32_t s) const { return k(s) + C::part_begin(C::kTail) * C::kAtomBytes; }
  // What exponents refer to up to the last block of warpgroup s, row by row; and its sums.
  __device__ uint32_t references(uint32_t s) const { return base + C::kReferencesAt + s * 256; }
  __device__ uint32_t sums(uint32_t s) const { return base + C::kSumsAt + s * 256; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full() const { return bar(0); }
  __device__ uint32_t q_empty() const { return bar(1); }
  __device__ uint32_t p_full(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t sums_full() const { return bar(4); }  // nobody reads Q any more, either
  __device__ uint32_t k_full(uint32_t s, int part) const { return bar(5 + C::kParts * s + part); }
  __device__ uint32_t k_empty(uint32_t s, int part) const { return bar(11 + C::kParts * s + part); }

  __device__ void init_barriers() const {
    mbar_init(q_full(), 1);
    mbar_init(q_empty(), 2);
    mbar_init(sums_full(), C::kConsumers / 32);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(p_full(s), C::kGroupWarps);
      for (int part = 0; part < C::kParts; ++part) {
        mbar_init(k_full(s, part), C::kProducers);
        mbar_init(k_empty(s, part), C::kGroupWarps);
      }
    }
    mbar_init_fence();
  }
};

}  // namespace magi
