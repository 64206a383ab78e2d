// SPDX-License-Identifier: Apache-2.0
// What the forward of index attention is launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace magi {

struct IndexFwdParams {
  CUtensorMap q_map, out_map;  // (d, head in group, kv head, token)
  const uint8_t *k, *v;
  int64_t k_token_bytes, k_head_bytes, v_token_bytes, v_head_bytes;
  const int32_t* lists;   // (total_q, heads_kv, max_keys)
  const int32_t* counts;  // (total_q, heads_kv)
  float* lse;
  int32_t num_lists;  // total_q * heads_kv
  int32_t heads_q, heads_kv, group, max_keys;
  int32_t k_chunks, v_chunks;        // of 16 bytes, in a row
  float scale_log2, unscale, slack;  // as in FwdKernelParams
};

}  // namespace magi
