// SPDX-License-Identifier: Apache-2.0
// What the kernels of the indexer are launched with, and the tile of the one that makes scores.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace magi {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// What is in a list: keys or blocks of keys, by scores that are sums over heads, or blocks by the
// dots of one head.
enum class IndexerForm { kKeys, kBlocks, kBlocksOfHeads };

// Some queries, from `first_query` on. A query sees the keys from k_start (total_q,) to before
// k_end (total_q,).
struct IndexerParams {
  CUtensorMap q_map, k_map;
  const float* weights;  // (total_q, heads); none for blocks of heads
  const int64_t *k_start, *k_end;
  float* scores;    // of keys: scratch (queries, pitch)
  uint32_t* ranks;  // of blocks: scratch (queries, num_lists, pitch), those of the best scores
  int32_t* lists;   // (total_q, num_lists, num_best)
  int64_t pitch;
  int32_t first_query, num_queries;
  int32_t total_k, heads, num_lists, num_best;
  int32_t block_size, local_blocks;  // of lists of blocks
};

// From the first key to before the last, among those that there are.
__device__ __forceinline__ int2 visible_keys(const IndexerParams& p, int64_t query) {
  const int64_t low = p.k_start[query] > 0 ? p.k_start[query] : 0;
  const int64_t high = p.k_end[query] < p.total_k ? p.k_end[query] : p.total_k;
  return low < high ? make_int2(static_cast<int>(low), static_cast<int>(high)) : make_int2(0, 0);
}

// So many key tiles are a work item, so that few queries of many keys fill the GPU, too.
constexpr int kIndexerTileKeys = 128, kIndexerSpanTiles = 64;

__host__ __device__ inline int indexer_spans(int64_t keys) {
  constexpr int kKeys = kIndexerTileKeys * kIndexerSpanTiles;
  return static_cast<int>((keys + kKeys - 1) / kKeys);
}

// A tile is kQueries queries of kHeads heads, against key tiles of kTileKeys keys.
template <typename T_, int kD_, int kHeads_, IndexerForm kForm_>
struct IndexerConfig {
  using T = T_;
  static constexpr int kD = kD_, kHeads = kHeads_;  // padded
  static constexpr IndexerForm kForm = kForm_;
  static constexpr int kAtoms = kD / 64;  // of 64 columns in shared memory
  static constexpr int kQueryHeads = 256;
  static constexpr int kQueries = kQueryHeads / kHeads;
  static constexpr int kGroups = 2;  // consumer warpgroups
  static constexpr int kTileKeys = kIndexerTileKeys;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 32;
  static constexpr int kQStages = 2, kKStages = 3;

  static constexpr uint32_t kQBytes = kQueryHeads * kAtoms * 128;
  static constexpr uint32_t kKBytes = kTileKeys * kAtoms * 128;
  // Offsets from the 1024-byte aligned start.
  static constexpr uint32_t kQAt = 0;
  static constexpr uint32_t kKAt = kQAt + kQStages * kQBytes;
  static constexpr uint32_t kWeightsAt = kKAt + kKStages * kKBytes;
  static constexpr uint32_t kBarriersAt = kWeightsAt + 2 * kQueryHeads * 4;
  static constexpr uint32_t kSmemBytes = kBarriersAt + 8 * (2 * kQStages + 2 * kKStages + kGroups);
};

}  // namespace magi
