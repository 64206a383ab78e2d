// SPDX-License-Identifier: Apache-2.0
// What the kernels of the indexer's divergence are launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/index/key_lists.h"

namespace magi {

constexpr int kKlHeads = 64;       // index heads of a tile; zeros behind those that there are
constexpr int kKlMostHeads = 128;  // query heads of attention
constexpr int kKlKeys = 64;        // of a block
constexpr uint32_t kKlAtomBytes = kKlKeys * 128;  // 64 rows of 64 columns in shared memory

// What both directions read of the indexer. Lists are those of one kv head.
struct IndexerOperands {
  CUtensorMap q_map;  // (columns, heads, queries)
  GatheredTensor k;
  KeyLists lists;
  const float* weights;  // (queries, heads)
  int32_t total_q, heads, head_dim;
};

struct IndexerKlFwdParams {
  IndexerOperands index;
  CUtensorMap q_map;  // of attention
  GatheredTensor k;
  const float* lse;  // (queries, heads_q)
  float scale_log2;
  int32_t heads_q, heads_kv;
  int32_t index_atoms,
      atoms;       // 64 columns each, of a row of the indexer and of a head of attention
  float* targets;  // (queries, max_entries)
  float *divergence, *lse_index, *mass;
};

// Queries from query_begin on.
struct IndexerKlBwdParams {
  IndexerOperands index;
  CUtensorMap dq_map;
  const float *targets, *lse_index, *mass, *grad;
  void* dq;  // (queries, heads, columns), contiguous
  float *dk, *dk_partials, *dweights;
  int32_t query_begin, num_queries;
};

}  // namespace magi
