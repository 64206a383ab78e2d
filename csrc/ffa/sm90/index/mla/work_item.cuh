// SPDX-License-Identifier: Apache-2.0
// What a CTA of index attention in MLA's form works on: 64 query rows of a work tile, which are all
// or half of it.
#pragma once

#include "ffa/sm90/index/tile_walk.cuh"
#include "ffa/sm90/index/work_tile.h"

namespace magi {

struct WorkItem {
  WorkTile tile;
  int half;         // which 64 rows of the tile
  int head, token;  // of its first row; the head is among those of the kv head

  // `first`: the tile that the numbers begin with.
  __device__ WorkItem(const WorkTiles& w, int number, int first = 0)
      : tile(work_tile(w, first + number / w.groups)), half(number % w.groups) {
    head = half * w.head_step;
    token = tile.token + half * w.token_step;
  }
};

// Both halves of a tile are neighbours, so that rows of keys come from L2 for the second.
__host__ __device__ inline int num_work_items(const WorkTiles& w) {
  return w.num_tiles() * w.groups;
}

}  // namespace magi
