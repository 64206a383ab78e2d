// SPDX-License-Identifier: Apache-2.0
// What the key-stationary backward of index attention is launched with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"

namespace magi {

// Rows of a warp in the scores, and what one bit of a granule mask stands for.
constexpr int kGranule = 16;
constexpr int kGranules = kTileBlockN / kGranule, kGranulesOfWarpgroup = kGranules / 2;

// What a work tile counts query heads in, and an entry query blocks.
constexpr int kMostGroup = 255, kMostQueryBlocks = 1 << 23;

// For each kv head and tile of 128 keys, the query blocks that see any key of the tile.
struct QueryLists {
  int32_t* entries;  // (heads_kv, tiles, num_lists): query block << 8 | its granules; ascending
  int2* tiles;       // (heads_kv, tiles): entries, and the granules that any of them has
  // (heads_kv, tiles, 2): query heads whose dk and dv are in `sums`, of each warpgroup.
  int32_t* summed_heads;
  int32_t num_tiles;
  int32_t num_lists;        // query blocks
  int32_t blocks_per_list;  // blocks of 64 queries
};

// Work tiles in the order in which CTAs take them. One is some query heads of a tile.
struct TileOrder {
  int2* work_tiles;             // kv head * tiles + tile; first head | heads << 8 | granules << 16
  int32_t* count;               // of them
  int32_t heads_of_part;        // query heads of a work tile,
  int32_t heads_of_small_part;  // and of one whose tile is long, or of the last kv head
};

// What a step of the dense backward needs, and the lists.
struct IndexKeysParams : BwdKernelParams {
  QueryLists lists;
  TileOrder order_of_tiles;
  // dv and dk of the heads so far: (heads_kv, tiles, warpgroup, 2, kD / 4, 128 threads, 2).
  float* sums;
};

// The kernels that make the lists and their order.
struct QueryListParams {
  QueryLists lists;
  TileOrder order;
  const int32_t *key_lists, *counts;  // (num_lists, heads_kv, max_entries), entries of each
  int32_t heads_kv, max_entries, k_block, total_k;
  int32_t group;  // query heads of a kv head
  int32_t num_ctas;
};

}  // namespace magi
