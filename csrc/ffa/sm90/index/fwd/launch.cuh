// SPDX-License-Identifier: Apache-2.0
// Launches the forward of index attention.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/fwd/kernel.cuh"
#include "ffa/sm90/index/launch_resident.h"
#include "magi/index.h"

namespace magi {

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

template <typename T, int kD>
magi_status launch_index_fwd(const magi_ffa_index_fwd_params& a) {
  if (a.total_q == 0) return MAGI_OK;
  IndexFwdParams k;
  MAGI_RETURN(index_fwd_params(a, &k));
  const char* doing = "launching the forward of index attention";
  using One = IndexFwdConfig<T, kD, 1>;
  using Two = IndexFwdConfig<T, kD, 2>;
  const int tiles = k.work.num_tiles();
  if (k.work.groups == 1) return launch_resident<One, index_fwd<One>>(a, tiles, k, doing);
  return launch_resident<Two, index_fwd<Two>>(a, tiles, k, doing);
}

}  // namespace magi

#define MAGI_FFA_INDEX_FWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_params* params) { \
    return magi::launch_index_fwd<TYPE, D>(*params);                                \
  }
