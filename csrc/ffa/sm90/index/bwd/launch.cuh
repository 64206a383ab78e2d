// SPDX-License-Identifier: Apache-2.0
// Launches the backward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/bwd/kernel.cuh"
#include "ffa/sm90/index/heads_map.h"
#include "magi/index.h"

namespace magi {

inline IndexBwdParams index_bwd_params(const magi_ffa_index_bwd_params& a) {
  IndexBwdParams k{};
  k.k = static_cast<const uint8_t*>(a.k);
  k.v = static_cast<const uint8_t*>(a.v);
  k.k_token_bytes = 2 * a.k_stride_token;
  k.k_head_bytes = 2 * a.k_stride_head;
  k.v_token_bytes = 2 * a.v_stride_token;
  k.v_head_bytes = 2 * a.v_stride_head;
  k.lists = a.lists;
  k.counts = a.counts;
  k.lse = a.lse;
  k.delta = a.delta;
  k.dk = a.dk;
  k.dv = a.dv;
  k.dk_partials = a.dk_partials;
  k.dv_partials = a.dv_partials;
  k.list_begin = a.token_begin * a.heads_kv;
  k.num_lists = (a.token_end - a.token_begin) * a.heads_kv;
  k.heads_q = a.heads_q;
  k.heads_kv = a.heads_kv;
  k.group = a.heads_q / a.heads_kv;
  k.max_keys = a.max_keys;
  k.k_chunks = a.head_dim / 8;
  k.v_chunks = a.head_dim_v / 8;
  k.head_dim = a.head_dim;
  k.head_dim_v = a.head_dim_v;
  k.scale = a.softmax_scale;
  k.scale_log2 = a.softmax_scale * kLog2e;
  return k;
}

inline magi_status index_bwd_maps(const magi_ffa_index_bwd_params& a, IndexBwdParams* k) {
  const auto encode = [&](CUtensorMap* map, const void* base, int32_t dim, int64_t token,
                          int64_t head, const char* name) {
    return group_heads_map(map, a.dtype, base, dim, a.heads_q, a.heads_kv, a.total_q, token, head,
                           name);
  };
  const int64_t d = a.head_dim;
  MAGI_RETURN(encode(&k->q_map, a.q, a.head_dim, a.q_stride_token, a.q_stride_head, "q"));
  MAGI_RETURN(
      encode(&k->dout_map, a.dout, a.head_dim_v, a.dout_stride_token, a.dout_stride_head, "dout"));
  return encode(&k->dq_map, a.dq, a.head_dim, d * a.heads_q, d, "dq");
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
  const int grid = k.num_lists < room ? k.num_lists : room;
  return launch_kernel(index_bwd<C>, dim3(grid), C::kThreads, C::kSmemBytes, a.stream, k,
                       "launching the backward of index attention");
}

template <typename T, int kD>
magi_status launch_index_bwd(const magi_ffa_index_bwd_params& a) {
  IndexBwdParams k = index_bwd_params(a);
  if (k.num_lists == 0) return MAGI_OK;
  MAGI_RETURN(index_bwd_maps(a, &k));
  if (k.group <= 64) return start_index_bwd<IndexBwdConfig<T, kD, 64>>(a, k);
  return start_index_bwd<IndexBwdConfig<T, kD, 128>>(a, k);
}

}  // namespace magi

#define MAGI_FFA_INDEX_BWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_params* params) { \
    return magi::launch_index_bwd<TYPE, D>(*params);                                \
  }
