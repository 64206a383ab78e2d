// SPDX-License-Identifier: Apache-2.0
// Launches the forward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/fwd/kernel.cuh"
#include "magi/index.h"

namespace magi {

inline magi_status index_fwd_params(const magi_ffa_index_fwd_params& a, IndexFwdParams* params) {
  IndexFwdParams k{};
  MAGI_RETURN(work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &k.work));
  k.k = static_cast<const uint8_t*>(a.k);
  k.v = static_cast<const uint8_t*>(a.v);
  k.k_token_bytes = 2 * a.k_stride_token;
  k.k_head_bytes = 2 * a.k_stride_head;
  k.v_token_bytes = 2 * a.v_stride_token;
  k.v_head_bytes = 2 * a.v_stride_head;
  k.keys = {a.lists, a.key_counts, a.k_starts, a.heads_kv, a.max_entries, a.k_block};
  k.lse = a.lse;
  k.k_chunks = a.head_dim / 8;
  k.v_chunks = a.head_dim_v / 8;
  k.scale_log2 = a.softmax_scale * kLog2e;
  k.unscale = 1.f / k.scale_log2;
  // As in fwd_scalars: P must fit its type.
  k.slack = (a.dtype == MAGI_BF16 ? 32.f : 8.f) * k.unscale;
  MAGI_RETURN(
      rows_map(&k.q_map, k.work, a.dtype, a.q, a.head_dim, a.q_stride_token, a.q_stride_head, "q"));
  MAGI_RETURN(rows_map(&k.out_map, k.work, a.dtype, a.out, a.head_dim_v, a.out_stride_token,
                       a.out_stride_head, "out"));
  *params = k;
  return MAGI_OK;
}

template <typename C>
magi_status start_index_fwd(const magi_ffa_index_fwd_params& a, const IndexFwdParams& k) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(index_fwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const int room = C::kCtas * (sms - a.sm_margin > 1 ? sms - a.sm_margin : 1);
  const int grid = k.work.num_tiles() < room ? k.work.num_tiles() : room;
  return launch_kernel(index_fwd<C>, dim3(grid), C::kThreads, C::kSmemBytes, a.stream, k,
                       "launching the forward of index attention");
}

template <typename T, int kD>
magi_status launch_index_fwd(const magi_ffa_index_fwd_params& a) {
  if (a.total_q == 0) return MAGI_OK;
  IndexFwdParams k;
  MAGI_RETURN(index_fwd_params(a, &k));
  if (k.work.groups == 1) return start_index_fwd<IndexFwdConfig<T, kD, 1>>(a, k);
  return start_index_fwd<IndexFwdConfig<T, kD, 2>>(a, k);
}

}  // namespace magi

#define MAGI_FFA_INDEX_FWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_params* params) { \
    return magi::launch_index_fwd<TYPE, D>(*params);                                \
  }
