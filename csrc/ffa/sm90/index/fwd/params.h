// SPDX-License-Identifier: Apache-2.0
// What the forwards of index attention that gather keys are launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/common/call_checks.h"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/index/key_lists.h"
#include "ffa/sm90/index/work_tile.h"
#include "magi/index.h"

namespace magi {

struct IndexFwdParams {
  CUtensorMap q_map, out_map;  // (d, head in group, token, kv head)
  GatheredTensor k, v;         // v: not where the values are the first columns of k
  KeyLists keys;
  WorkTiles work;
  float* lse;
  float scale_log2, unscale, slack;  // as in FwdKernelParams
};

inline magi_status index_fwd_params(const magi_ffa_index_fwd_params& a, IndexFwdParams* params) {
  IndexFwdParams k{};
  MAGI_RETURN(work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &k.work));
  k.k = gathered_tensor(a.k, a.k_stride_token, a.k_stride_head, a.head_dim);
  k.v = gathered_tensor(a.v, a.v_stride_token, a.v_stride_head, a.head_dim_v);
  k.keys = key_lists(a);
  k.lse = a.lse;
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

}  // namespace magi
