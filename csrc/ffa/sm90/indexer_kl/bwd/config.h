// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the backward of the indexer's divergence.
#pragma once

#include "device/mbarrier.cuh"
#include "ffa/sm90/indexer_kl/params.h"

namespace magi {

template <typename T_, int kD_>
struct IndexerKlBwdConfig {
  using T = T_;
  static constexpr int kD = kD_, kAtoms = kD / 64;
  static constexpr int kCtas = 2;  // on a multiprocessor: one multiplies while the other adds
  static constexpr int kProducers = 128, kConsumers = 128;
  static constexpr int kThreads = kProducers + kConsumers;
  // The launch bounds give out 128.
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 40;
  static constexpr int kQStages = 2, kKStages = 3;

  static constexpr uint32_t kTileBytes = kAtoms * kKlAtomBytes;
  // Offsets from the 1024-byte aligned start. dq is staged over Q.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kTileBytes;
  static constexpr uint32_t kInnerAt = kKAt + kKStages * kTileBytes;
  static constexpr uint32_t kWeightsAt = kInnerAt + 2 * kKlAtomBytes;
  static constexpr uint32_t kSumsAt = kWeightsAt + kQStages * kKlHeads * 4;
  static constexpr uint32_t kBarriersAt = kSumsAt + 4 * kKlHeads * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 8 * 2 * (kQStages + kKStages);
};

template <typename C>
struct IndexerKlBwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q(uint32_t s) const { return base + C::kQAt + s * C::kTileBytes; }
  __device__ uint32_t k(uint32_t s) const { return base + C::kKAt + s * C::kTileBytes; }
  // The gradients of the dots of a block, in turns: rows of keys, columns of heads.
  __device__ uint32_t inner(uint32_t s) const { return base + C::kInnerAt + s * kKlAtomBytes; }
  __device__ uint32_t weights(uint32_t s) const { return base + C::kWeightsAt + s * kKlHeads * 4; }
  // The gradients of weights, from each warp.
  __device__ uint32_t sums(int warp) const { return base + C::kSumsAt + warp * kKlHeads * 4; }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full(uint32_t s) const { return bar(s); }  // with weights
  __device__ uint32_t q_empty(uint32_t s) const { return bar(C::kQStages + s); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(2 * C::kQStages + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(2 * C::kQStages + C::kKStages + s); }

  __device__ void init_barriers() const {
    for (uint32_t s = 0; s < C::kQStages; ++s) {
      mbar_init(q_full(s), C::kProducers + 1);
      mbar_init(q_empty(s), 1);
    }
    for (uint32_t s = 0; s < C::kKStages; ++s) {
      mbar_init(k_full(s), C::kProducers);
      mbar_init(k_empty(s), C::kConsumers / 32);
    }
    mbar_init_fence();
  }
};

}  // namespace magi
