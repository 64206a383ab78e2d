// SPDX-License-Identifier: Apache-2.0
// Launches the backward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/bwd/kernel.cuh"
#include "ffa/sm90/index/launch_resident.h"
#include "magi/index.h"

namespace magi {

inline magi_status index_bwd_params(const magi_ffa_index_bwd_params& a, IndexBwdParams* params) {
  IndexBwdParams k{};
  MAGI_RETURN(work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &k.work));
  k.k = gathered_tensor(a.k, a.k_stride_token, a.k_stride_head, a.head_dim);
  k.v = gathered_tensor(a.v, a.v_stride_token, a.v_stride_head, a.head_dim_v);
  k.keys = key_lists(a);
  k.lse = a.lse;
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
  k.scale_log2 = a.softmax_scale * kLog2e;
  const int64_t d = a.head_dim;
  MAGI_RETURN(
      rows_map(&k.q_map, k.work, a.dtype, a.q, a.head_dim, a.q_stride_token, a.q_stride_head, "q"));
  MAGI_RETURN(rows_map(&k.dout_map, k.work, a.dtype, a.dout, a.head_dim_v, a.dout_stride_token,
                       a.dout_stride_head, "dout"));
  MAGI_RETURN(rows_map(&k.dq_map, k.work, a.dtype, a.dq, a.head_dim, d * a.heads_q, d, "dq"));
  *params = k;
  return MAGI_OK;
}

template <typename T, int kD>
magi_status launch_index_bwd(const magi_ffa_index_bwd_params& a) {
  if (a.list_begin == a.list_end) return MAGI_OK;
  IndexBwdParams k;
  MAGI_RETURN(index_bwd_params(a, &k));
  const char* doing = "launching the backward of index attention";
  using One = IndexBwdConfig<T, kD, 64>;
  using Two = IndexBwdConfig<T, kD, 128>;
  if (k.work.groups == 1) return launch_resident<One, index_bwd<One>>(a, k.num_tiles, k, doing);
  return launch_resident<Two, index_bwd<Two>>(a, k.num_tiles, k, doing);
}

}  // namespace magi

#define MAGI_FFA_INDEX_BWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_params* params) { \
    return magi::launch_index_bwd<TYPE, D>(*params);                                \
  }
