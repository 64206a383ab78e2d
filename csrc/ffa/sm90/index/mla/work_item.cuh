// SPDX-License-Identifier: Apache-2.0
// What a CTA of index attention in MLA's form works on: the 64 query rows of one warpgroup's part
// of a work tile.
#pragma once

#include "ffa/sm90/index/tile_walk.cuh"
#include "ffa/sm90/index/work_tile.h"

namespace magi {

struct WorkItem {
  WorkTile tile;
  int part;         // which 64 rows of the tile
  int head, token;  // of its first row; the head is among those of the kv head

  // `first`: the tile that the numbers begin with.
  __device__ WorkItem(const WorkTiles& w, int number, int first = 0)
      : tile(work_tile(w, first + number / w.groups)), part(number % w.groups) {
    head = part * w.head_step;
    token = tile.token + part * w.token_step;
  }
};

// Parts of a tile are neighbours, so that rows of keys come from L2 for all but the first.
__host__ __device__ inline int num_work_items(const WorkTiles& w) {
  return w.num_tiles() * w.groups;
}

}  // namespace magi
