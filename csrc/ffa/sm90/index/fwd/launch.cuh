// SPDX-License-Identifier: Apache-2.0
// Launches the forward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/fwd/kernel.cuh"
#include "magi/index.h"

namespace magi {

template <typename C>
magi_status start_index_fwd(const magi_ffa_index_fwd_params& a, IndexFwdParams& k) {
  const auto type = a.dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const uint64_t d = a.head_dim, dv = a.head_dim_v, group = k.group, heads = a.heads_kv,
                 tokens = a.total_q;
  MAGI_RETURN(encode_map(
      &k.q_map, type, a.q, {d, group, heads, tokens},
      {2 * a.q_stride_head, 2 * a.q_stride_head * k.group, 2 * a.q_stride_token},
      {64, 64, 1, 1}, "q"));
  MAGI_RETURN(encode_map(
      &k.out_map, type, a.out, {dv, group, heads, tokens},
      {2 * a.out_stride_head, 2 * a.out_stride_head * k.group, 2 * a.out_stride_token},
      {64, 64, 1, 1}, "out"));
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(index_fwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const int room = C::kCtas * (sms - a.sm_margin > 1 ? sms - a.sm_margin : 1);
  const int grid = k.num_lists < room ? k.num_lists : room;
  index_fwd<C><<<grid, C::kThreads, C::kSmemBytes, static_cast<cudaStream_t>(a.stream)>>>(k);
  return cuda_status(cudaGetLastError(), "launching the forward of index attention");
}

template <typename T, int kD>
magi_status launch_index_fwd(const magi_ffa_index_fwd_params& a) {
  IndexFwdParams k{};
  k.k = static_cast<const uint8_t*>(a.k);
  k.v = static_cast<const uint8_t*>(a.v);
  k.k_token_bytes = 2 * a.k_stride_token;
  k.k_head_bytes = 2 * a.k_stride_head;
  k.v_token_bytes = 2 * a.v_stride_token;
  k.v_head_bytes = 2 * a.v_stride_head;
  k.lists = a.lists;
  k.counts = a.counts;
  k.lse = a.lse;
  k.num_lists = a.total_q * a.heads_kv;
  k.heads_q = a.heads_q;
  k.heads_kv = a.heads_kv;
  k.group = a.heads_q / a.heads_kv;
  k.max_keys = a.max_keys;
  k.k_chunks = a.head_dim / 8;
  k.v_chunks = a.head_dim_v / 8;
  k.scale_log2 = a.softmax_scale * kLog2e;
  k.unscale = 1.f / k.scale_log2;
  // As in fwd_scalars: P must fit its type.
  k.slack = (a.dtype == MAGI_BF16 ? 32.f : 8.f) * k.unscale;
  if (k.num_lists == 0) return MAGI_OK;
  if (k.group <= 64) return start_index_fwd<IndexFwdConfig<T, kD, 1>>(a, k);
  return start_index_fwd<IndexFwdConfig<T, kD, 2>>(a, k);
}

}  // namespace magi

#define MAGI_FFA_INDEX_FWD_INSTANCE(TYPE, D, DV, STEM)                          \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_params* params) { \
    return magi::launch_index_fwd<TYPE, D>(*params);                            \
  }
