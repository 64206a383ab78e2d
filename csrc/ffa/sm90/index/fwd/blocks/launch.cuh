// SPDX-License-Identifier: Apache-2.0
// Launches the forward of block lists.
#pragma once

#include "ffa/sm90/index/fwd/blocks/kernel.cuh"
#include "ffa/sm90/index/launch_resident.h"
#include "magi/index.h"

namespace magi {

magi_status order_lists(const ListOrderParams& p, void* stream);  // index/list_order.cu

inline magi_status index_blocks_maps(const magi_ffa_index_fwd_blocks_params& a,
                                     IndexBlocksParams* k) {
  const CUtensorMapDataType type =
      a.dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const uint64_t d = a.head_dim, dv = a.head_dim_v, tq = a.total_q, tk = a.total_k;
  const uint64_t hk = a.heads_kv;
  const uint32_t pack = k->pack, tokens = k->tile_tokens, rows = k->box_rows;
  MAGI_RETURN(encode_map(&k->q_map, type, a.q, {d, pack, tq, hk},
                         {2 * a.q_stride_head, 2 * a.q_stride_token, 2 * a.q_stride_head * pack},
                         {64, pack, tokens, 1}, "q"));
  MAGI_RETURN(encode_map(&k->k_maps[0], type, a.k, {d, tk, hk},
                         {2 * a.k_stride_token, 2 * a.k_stride_head}, {64, rows, 1}, "k"));
  MAGI_RETURN(encode_map(&k->v_maps[0], type, a.v, {dv, tk, hk},
                         {2 * a.v_stride_token, 2 * a.v_stride_head}, {64, rows, 1}, "v"));
  return encode_map(&k->out_map, type, a.out, {dv, pack, tq, hk},
                    {2 * a.out_stride_head, 2 * a.out_stride_token, 2 * a.out_stride_head * pack},
                    {64, pack, 64 / pack, 1}, "out");
}

template <typename C>
void index_blocks_params(const magi_ffa_index_fwd_blocks_params& a, IndexBlocksParams* k) {
  *k = IndexBlocksParams{};
  k->workspace = a.workspace;
  k->lse = a.lse;
  k->total_q = a.total_q;
  k->total_k = a.total_k;
  k->heads_q = a.heads_q;
  k->heads_kv = a.heads_kv;
  k->pack = a.heads_q / a.heads_kv;
  k->tile_tokens = C::kBlockM / k->pack;
  k->num_tiles =
      static_cast<int32_t>((static_cast<int64_t>(a.total_q) + k->tile_tokens - 1) / k->tile_tokens);
  k->head_units = a.heads_kv;
  k->head_dim_v = a.head_dim_v;
  k->scale_log2 = a.softmax_scale * kLog2e;
  k->unscale = 1.f / k->scale_log2;
  // As in fwd_scalars: P must fit its type.
  k->slack = (a.dtype == MAGI_BF16 ? 32.f : 8.f) * k->unscale;
  k->lists = a.lists;
  k->counts = a.counts;
  k->order = a.workspace + 1;
  k->num_lists =
      static_cast<int32_t>((static_cast<int64_t>(a.total_q) + a.q_block - 1) / a.q_block);
  k->max_entries = a.max_entries;
  k->k_block = a.k_block;
  k->tiles_of_list = a.q_block / k->tile_tokens;
  if (k->tiles_of_list > k->num_tiles) k->tiles_of_list = k->num_tiles;
  k->box_rows = C::kBlockN;
  while (a.k_block % k->box_rows != 0) k->box_rows /= 2;
}

template <typename C>
magi_status launch_index_fwd_blocks_tiles(const magi_ffa_index_fwd_blocks_params& a) {
  IndexBlocksParams k;
  index_blocks_params<C>(a, &k);
  MAGI_RETURN(index_blocks_maps(a, &k));
  MAGI_RETURN(
      order_lists({a.counts, a.workspace + 1, a.workspace, k.num_lists, a.heads_kv}, a.stream));
  return launch_resident<C, index_fwd_blocks<C>>(a, k.num_tiles * k.head_units, k,
                                                 "launching the forward of block lists");
}

// Lists whose rows do not fill two warpgroups take one.
template <typename T, int kD>
magi_status launch_index_fwd_blocks(const magi_ffa_index_fwd_blocks_params& a) {
  using Two = IndexBlocksConfig<T, kD, 2>;
  const int64_t rows = static_cast<int64_t>(a.q_block) * (a.heads_q / a.heads_kv);
  if (rows % Two::kBlockM == 0) return launch_index_fwd_blocks_tiles<Two>(a);
  return launch_index_fwd_blocks_tiles<IndexBlocksConfig<T, kD, 1>>(a);
}

}  // namespace magi

#define MAGI_FFA_INDEX_FWD_BLOCKS_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_blocks_params* params) { \
    return magi::launch_index_fwd_blocks<TYPE, D>(*params);                                \
  }
