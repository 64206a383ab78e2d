// SPDX-License-Identifier: Apache-2.0
// What the query-stationary backwards of index attention are launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/index/operands.h"

namespace magi {

struct IndexBwdParams {
  CUtensorMap q_map, dout_map, dq_map;  // (d, head in group, token, kv head)
  GatheredTensor k, v;                  // v: not where the values are the first columns of k
  KeyLists keys;
  WorkTiles work;
  const float *lse, *delta;
  float *dk, *dv;                    // (total_k, heads_kv, ..), to which shares are added, or
  float *dk_partials, *dv_partials;  // (tiles, max_keys, ..) from tile_begin on; or NULL
  int32_t tile_begin, num_tiles;     // work tiles of this call
  int32_t head_dim, head_dim_v;
  float scale, scale_log2;
};

inline magi_status index_bwd_params(const magi_ffa_index_bwd_params& a, IndexBwdParams* params) {
  IndexBwdParams k{};
  MAGI_RETURN(set_index_operands(a, &k));
  k.delta = a.delta;
  k.dk = a.dk;
  k.dv = a.dv;
  k.dk_partials = a.dk_partials;
  k.dv_partials = a.dv_partials;
  const int tiles = a.heads_kv * k.work.tiles_of_list;
  k.tile_begin = a.list_begin * tiles;
  k.num_tiles = (a.list_end - a.list_begin) * tiles;
  k.head_dim = a.head_dim;
  k.head_dim_v = a.head_dim_v;
  k.scale = a.softmax_scale;
  const int64_t d = a.head_dim;
  MAGI_RETURN(rows_map(&k.dout_map, k.work, a.dtype, a.dout, a.head_dim_v, a.dout_stride_token,
                       a.dout_stride_head, "dout"));
  MAGI_RETURN(rows_map(&k.dq_map, k.work, a.dtype, a.dq, a.head_dim, d * a.heads_q, d, "dq"));
  *params = k;
  return MAGI_OK;
}

}  // namespace magi
