// SPDX-License-Identifier: Apache-2.0
// Host side of the key-stationary backward of index attention: parameters and the five launches.
#pragma once

#include "ffa/common/host.h"
#include "ffa/sm90/bwd/launch/maps.h"
#include "ffa/sm90/bwd/rows/preprocess.cuh"
#include "ffa/sm90/index/bwd/keys/kernel.cuh"
#include "ffa/sm90/index/bwd/keys/postprocess.cuh"
#include "ffa/sm90/index/bwd/keys/workspace.h"

namespace magi {

magi_status make_query_lists(const QueryListParams& p, void* stream);  // index/query_lists.cu

struct IndexKeysCall {
  QueryListParams lists;
  BwdRowParams rows;
  IndexKeysParams main;
};

template <typename C>
void index_keys_params(const magi_ffa_index_bwd_keys_params& a, int sms, IndexKeysCall* call) {
  const IndexKeysSizes s = index_keys_sizes(a, sms);
  const IndexKeysWorkspace w = index_keys_layout(a, sms, C::kD);
  uint8_t* workspace = static_cast<uint8_t*>(a.workspace);
  auto words = [&](int64_t at) { return reinterpret_cast<int32_t*>(workspace + at); };
  auto floats = [&](int64_t at) { return reinterpret_cast<float*>(workspace + at); };
  auto pairs = [&](int64_t at) { return reinterpret_cast<int2*>(workspace + at); };
  const QueryLists lists{words(w.entries), pairs(w.tiles), words(w.summed_heads),
                         s.num_tiles,      s.num_lists,    a.q_block / C::kBlockM};
  const TileOrder order{pairs(w.work_tiles), words(w.count), s.heads_of_part,
                        s.heads_of_small_part};
  call->lists = {lists,         order,     a.lists,   a.counts, a.heads_kv,
                 a.max_entries, a.k_block, a.total_k, s.group,  sms};
  BwdRowParams& r = call->rows;
  r.out = a.out;
  r.dout = a.dout;
  r.lse = a.lse;
  r.delta = a.delta;
  r.stats = floats(w.stats);
  r.dq_accum = floats(w.dq_accum);
  r.workspace = words(0);
  r.dq = a.dq;
  r.out_stride_token = a.out_stride_token;
  r.out_stride_head = a.out_stride_head;
  r.dout_stride_token = a.dout_stride_token;
  r.dout_stride_head = a.dout_stride_head;
  r.total_q = a.total_q;
  r.total_k = a.total_k;
  r.num_m_blocks = s.num_m_blocks;
  r.heads_q = a.heads_q;
  r.heads_kv = a.heads_kv;
  r.head_dim = a.head_dim;
  r.head_dim_v = a.head_dim_v;
  r.dim_blocks = C::kD / 64;
  r.grad_scale = a.softmax_scale;
  r.dropout_inverse_scale = 1.f;
  IndexKeysParams& k = call->main;
  k.lists = lists;
  k.order_of_tiles = order;
  k.sums = floats(w.sums);
  k.workspace = r.workspace;
  k.stats = r.stats;
  k.dq_accum = r.dq_accum;
  k.total_q = a.total_q;
  k.total_k = a.total_k;
  k.num_m_blocks = s.num_m_blocks;
  k.heads_q = a.heads_q;
  k.heads_kv = a.heads_kv;
  k.head_dim = a.head_dim;
  k.head_dim_v = a.head_dim_v;
  k.group = s.group;
  k.scale = 1.f;
  k.scale_log2 = a.softmax_scale * kLog2e;
  k.grad_scale = a.softmax_scale;
}

template <typename C, bool kHasHalves>
magi_status start_index_bwd_keys(const magi_ffa_index_bwd_keys_params& a, const IndexKeysParams& k,
                                 int ctas) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(index_bwd_keys<C, kHasHalves>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes);
  }));
  return launch_behind(index_bwd_keys<C, kHasHalves>, dim3(ctas), C::kThreads, C::kSmemBytes,
                       a.stream, k, "launching the backward of index attention");
}

template <typename C>
magi_status launch_index_bwd_keys(const magi_ffa_index_bwd_keys_params& a) {
  using T = typename C::T;
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  MAGI_RETURN(check_workspace(a.workspace_bytes, index_keys_layout(a, sms, C::kD).bytes,
                              "magi_ffa_index_bwd_keys_workspace"));
  IndexKeysCall call{};
  index_keys_params<C>(a, sms, &call);
  MAGI_RETURN(operand_maps<C>(a, a.total_k, &call.main));
  MAGI_RETURN(grad_maps(a, a.total_k, &call.main));
  const int blocks = call.main.num_m_blocks, ctas = sms - a.sm_margin > 1 ? sms - a.sm_margin : 1;
  MAGI_RETURN(make_query_lists(call.lists, a.stream));
  MAGI_RETURN(launch_kernel(bwd_preprocess<T, C::kBlockM, Contributions::kNotCounted>,
                            dim3(blocks, a.heads_q), kRowThreads, 0, a.stream, call.rows,
                            "launching the start of the backward of index attention"));
  const auto start =
      a.k_block % kTileBlockN ? start_index_bwd_keys<C, true> : start_index_bwd_keys<C, false>;
  MAGI_RETURN(start(a, call.main, ctas));
  return launch_kernel(index_round_dq<T>, dim3(blocks, a.heads_q), kRowThreads, 0, a.stream,
                       call.rows, "launching the end of the backward of index attention",
                       a.sm_margin == 0);
}

}  // namespace magi

#define MAGI_FFA_INDEX_BWD_KEYS_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_keys_params* params) { \
    return magi::launch_index_bwd_keys<magi::BwdConfig<TYPE, D, DV>>(*params);           \
  }
