// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the forward of the indexer's divergence.
#pragma once

#include "device/mbarrier.cuh"
#include "ffa/sm90/indexer_kl/params.h"

namespace magi {

// kHeads: query heads of a kv head of attention, padded.
template <typename T_, int kHeads_>
struct IndexerKlFwdConfig {
  using T = T_;
  static constexpr int kHeads = kHeads_;
  // Of 64 columns: of all kv heads together, and of the indexer.
  static constexpr int kMostAtoms = kHeads == 16 ? 36 : 9, kMostIndexAtoms = 2;
  static constexpr int kMostHeadsKv = kHeads == 128 ? 1 : kMostAtoms;
  static constexpr int kCtas = 1;  // on a multiprocessor
  static constexpr int kProducers = 128, kConsumers = 256, kWarps = kConsumers / 32;
  static constexpr int kThreads = kProducers + kConsumers;
  // The launch bounds give out 168.
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  // A stage has an atom of a block of keys.
  static constexpr uint32_t kStages = kHeads == 128 ? 8 : 16;

  static constexpr uint32_t kQAtomBytes = kHeads * 128;
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kQIndexAt = kQAt + kMostAtoms * kQAtomBytes;
  static constexpr uint32_t kKAt = kQIndexAt + kMostIndexAtoms * kKlAtomBytes;
  static constexpr uint32_t kLseAt = kKAt + kStages * kKlAtomBytes;  // base 2
  static constexpr uint32_t kWeightsAt = kLseAt + kMostHeadsKv * kHeads * 4;
  static constexpr uint32_t kSumsAt = kWeightsAt + kKlHeads * 4;
  static constexpr uint32_t kBarriersAt = kSumsAt + 2 * kWarps * 32;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 8 * (2 * kStages + 4);
  static_assert(kSmemBytes <= 227 << 10, "a multiprocessor has no more");
};

template <typename C>
struct IndexerKlFwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start

  __device__ uint32_t q() const { return base + C::kQAt; }  // kv head by kv head
  __device__ uint32_t q_index() const { return base + C::kQIndexAt; }
  __device__ uint32_t k(uint32_t s) const { return base + C::kKAt + s * kKlAtomBytes; }
  __device__ uint32_t lse() const { return base + C::kLseAt; }
  __device__ uint32_t weights() const { return base + C::kWeightsAt; }
  // What a warp has added up of a query, by turns in one of two places.
  __device__ uint32_t sums(uint32_t place, int warp) const {
    return base + C::kSumsAt + (place * C::kWarps + warp) * 32;
  }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full() const { return bar(0); }  // with q_index, lse and weights
  __device__ uint32_t q_empty() const { return bar(1); }
  // A warpgroup may take its block: all atoms of the other's are there.
  __device__ uint32_t turn(int group) const { return bar(2 + group); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(4 + C::kStages + s); }

  __device__ void init_barriers() const {
    mbar_init(q_full(), C::kProducers + 1);
    mbar_init(q_empty(), C::kWarps);
    for (int group = 0; group < 2; ++group) mbar_init(turn(group), C::kWarps / 2);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      mbar_init(k_full(s), C::kProducers);
      mbar_init(k_empty(s), C::kWarps / 2);
    }
    mbar_init_fence();
  }
};

}  // namespace magi
