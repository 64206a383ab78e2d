// SPDX-License-Identifier: Apache-2.0
// What the kernels of the indexer are launched with, and the tile of the one that makes scores.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace magi {

// Some queries, from `first_query` on. `scores` (queries, pitch) float32 is scratch memory.
struct IndexerParams {
  CUtensorMap q_map, k_map;
  const float* weights;   // (total_q, heads)
  const int64_t* bounds;  // (total_q, 2): first key that a query sees, and the one behind its last
  float* scores;
  int32_t* lists;  // (total_q, num_best)
  int64_t pitch;
  int32_t first_query, num_queries;
  int32_t total_k, heads, num_best;
};

// So many blocks of keys of a tile are a work item, so that few queries of many keys fill the GPU,
// too.
constexpr int kIndexerBlockKeys = 128, kIndexerSpanBlocks = 64;

// Of a row of `pitch` scores.
__host__ __device__ inline int indexer_spans(int64_t pitch) {
  constexpr int kKeys = kIndexerBlockKeys * kIndexerSpanBlocks;
  return static_cast<int>((pitch + kKeys - 1) / kKeys);
}

// A tile is kQueries queries of kHeads heads, against blocks of kBlockKeys keys.
template <typename T_, int kD_, int kHeads_>
struct IndexerConfig {
  using T = T_;
  static constexpr int kD = kD_, kHeads = kHeads_;  // padded
  static constexpr int kAtoms = kD / 64;            // of 64 columns in shared memory
  static constexpr int kColumns = 256;  // heads of all queries: the columns of a product
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kGroups = 2;  // consumer warpgroups, of 64 keys each
  static constexpr int kBlockKeys = kIndexerBlockKeys;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 32;
  static constexpr int kQStages = 2, kKStages = 3;
  static_assert(kBlockKeys == 64 * kGroups);

  static constexpr uint32_t kQBytes = kColumns * kAtoms * 128;
  static constexpr uint32_t kKBytes = kBlockKeys * kAtoms * 128;
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kQBytes;
  static constexpr uint32_t kWeightsAt = kKAt + kKStages * kKBytes;
  static constexpr uint32_t kBarriersAt = kWeightsAt + 2 * kColumns * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 8 * (2 * kQStages + 2 * kKStages + kGroups);
};

}  // namespace magi
