// SPDX-License-Identifier: Apache-2.0
// What the forwards of index attention that gather keys are launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/index/operands.h"

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
  MAGI_RETURN(set_index_operands(a, &k));
  k.unscale = 1.f / k.scale_log2;
  // As in fwd_scalars: P must fit its type.
  k.slack = (a.dtype == MAGI_BF16 ? 32.f : 8.f) * k.unscale;
  MAGI_RETURN(rows_map(&k.out_map, k.work, a.dtype, a.out, a.head_dim_v, a.out_stride_token,
                       a.out_stride_head, "out"));
  *params = k;
  return MAGI_OK;
}

}  // namespace magi
