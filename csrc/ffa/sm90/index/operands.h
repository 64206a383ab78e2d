// SPDX-License-Identifier: Apache-2.0
// What the kernels of both directions that gather keys read.
#pragma once

#include "ffa/common/call_checks.h"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/index/key_lists.h"
#include "ffa/sm90/index/work_tile.h"
#include "magi/index.h"

namespace magi {

// `a` are the parameters of the call, `k` those of the kernel.
template <typename CallParams, typename KernelParams>
magi_status set_index_operands(const CallParams& a, KernelParams* k) {
  MAGI_RETURN(work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &k->work));
  k->k = gathered_tensor(a.k, a.k_stride_token, a.k_stride_head, a.head_dim);
  k->v = gathered_tensor(a.v, a.v_stride_token, a.v_stride_head, a.head_dim_v);
  k->keys = key_lists(a);
  k->lse = a.lse;
  k->scale_log2 = a.softmax_scale * kLog2e;
  return rows_map(&k->q_map, k->work, a.dtype, a.q, a.head_dim, a.q_stride_token, a.q_stride_head,
                  "q");
}

}  // namespace magi
