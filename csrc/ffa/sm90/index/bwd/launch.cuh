// SPDX-License-Identifier: Apache-2.0
// Launches the backward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/bwd/kernel.cuh"
#include "magi/index.h"

namespace magi {

inline magi_status index_bwd_params(const magi_ffa_index_bwd_params& a, IndexBwdParams* params) {
  IndexBwdParams k{};
  MAGI_RETURN(work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &k.work));
  k.k = static_cast<const uint8_t*>(a.k);
  k.v = static_cast<const uint8_t*>(a.v);
  k.k_token_bytes = 2 * a.k_stride_token;
  k.k_head_bytes = 2 * a.k_stride_head;
  k.v_token_bytes = 2 * a.v_stride_token;
  k.v_head_bytes = 2 * a.v_stride_head;
  k.keys = {a.lists, a.key_counts, a.k_starts, a.heads_kv, a.max_entries, a.k_block};
  k.lse = a.lse;
  k.delta = a.delta;
  k.dk = a.dk;
  k.dv = a.dv;
  k.dk_partials = a.dk_partials;
  k.dv_partials = a.dv_partials;
  const int tiles = a.heads_kv * k.work.tiles_of_list;
  k.tile_begin = a.list_begin * tiles;
  k.num_tiles = (a.list_end - a.list_begin) * tiles;
  k.k_chunks = a.head_dim / 8;
  k.v_chunks = a.head_dim_v / 8;
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

template <typename C>
magi_status start_index_bwd(const magi_ffa_index_bwd_params& a, const IndexBwdParams& k) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(index_bwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const int room = sms - a.sm_margin > 1 ? sms - a.sm_margin : 1;
  const int grid = k.num_tiles < room ? k.num_tiles : room;
  return launch_kernel(index_bwd<C>, dim3(grid), C::kThreads, C::kSmemBytes, a.stream, k,
                       "launching the backward of index attention");
}

template <typename T, int kD>
magi_status launch_index_bwd(const magi_ffa_index_bwd_params& a) {
  if (a.list_begin == a.list_end) return MAGI_OK;
  IndexBwdParams k;
  MAGI_RETURN(index_bwd_params(a, &k));
  if (k.work.groups == 1) return start_index_bwd<IndexBwdConfig<T, kD, 64>>(a, k);
  return start_index_bwd<IndexBwdConfig<T, kD, 128>>(a, k);
}

}  // namespace magi

#define MAGI_FFA_INDEX_BWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_params* params) { \
    return magi::launch_index_bwd<TYPE, D>(*params);                                \
  }
