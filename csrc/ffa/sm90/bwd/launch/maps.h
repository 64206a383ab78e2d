// SPDX-License-Identifier: Apache-2.0
// Tensor maps of a backward whose tiles are keys. `Params` are those of the call.
#pragma once

#include "ffa/common/host.h"
#include "ffa/sm90/bwd/config.h"
#include "ffa/sm90/bwd/params.h"

namespace magi {

inline CUtensorMapDataType map_type(int32_t dtype) {
  return dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Makes those of q, dout, k and v, with so many keys.
template <typename C, typename Params>
magi_status operand_maps(const Params& a, uint64_t keys, BwdKernelParams* k) {
  const CUtensorMapDataType type = map_type(a.dtype);
  const uint64_t d = a.head_dim, dv = a.head_dim_v, tq = a.total_q, hq = a.heads_q, hk = a.heads_kv;
  MAGI_RETURN(encode_map(&k->q_map, type, a.q, {d, tq, hq},
                         {2 * a.q_stride_token, 2 * a.q_stride_head}, {64, C::kBlockM, 1}, "q"));
  MAGI_RETURN(encode_map(&k->do_map, type, a.dout, {dv, tq, hq},
                         {2 * a.dout_stride_token, 2 * a.dout_stride_head}, {64, C::kBlockM, 1},
                         "dout"));
  MAGI_RETURN(encode_map(&k->k_map, type, a.k, {d, keys, hk},
                         {2 * a.k_stride_token, 2 * a.k_stride_head}, {64, C::kBlockN, 1}, "k"));
  return encode_map(&k->v_map, type, a.v, {dv, keys, hk},
                    {2 * a.v_stride_token, 2 * a.v_stride_head}, {64, C::kBlockN, 1}, "v");
}

// Makes those of dk and dv in 16 bits, contiguous, by the 64 rows of a warpgroup.
template <typename Params>
magi_status grad_maps(const Params& a, uint64_t keys, BwdKernelParams* k) {
  const CUtensorMapDataType type = map_type(a.dtype);
  const uint64_t d = a.head_dim, dv = a.head_dim_v, hk = a.heads_kv;
  const int64_t row_k = 2ll * a.head_dim, row_v = 2ll * a.head_dim_v;
  MAGI_RETURN(encode_map(&k->dk_map, type, a.dk, {d, keys, hk}, {row_k * a.heads_kv, row_k},
                         {64, 64, 1}, "dk"));
  return encode_map(&k->dv_map, type, a.dv, {dv, keys, hk}, {row_v * a.heads_kv, row_v},
                    {64, 64, 1}, "dv");
}

}  // namespace magi
