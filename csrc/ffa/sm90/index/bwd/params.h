// SPDX-License-Identifier: Apache-2.0
// What the backward of index attention is launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/index/key_lists.h"
#include "ffa/sm90/index/work_tile.h"

namespace magi {

struct IndexBwdParams {
  CUtensorMap q_map, dout_map, dq_map;  // (d, head in group, token, kv head)
  GatheredTensor k, v;
  KeyLists keys;
  WorkTiles work;
  const float *lse, *delta;
  float *dk, *dv;                    // (total_k, heads_kv, ..), to which shares are added, or
  float *dk_partials, *dv_partials;  // (tiles, max_keys, ..) from tile_begin on; or NULL
  int32_t tile_begin, num_tiles;     // work tiles of this call
  int32_t head_dim, head_dim_v;
  float scale, scale_log2;
};

}  // namespace magi
