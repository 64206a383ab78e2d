// SPDX-License-Identifier: Apache-2.0
// What the backward of index attention is launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace magi {

struct IndexBwdParams {
  CUtensorMap q_map, dout_map, dq_map;  // (d, head in group, kv head, token)
  const uint8_t *k, *v;
  int64_t k_token_bytes, k_head_bytes, v_token_bytes, v_head_bytes;
  const int32_t* lists;   // (total_q, heads_kv, max_keys)
  const int32_t* counts;  // (total_q, heads_kv)
  const float *lse, *delta;
  float *dk, *dv;                    // (total_k, heads_kv, ..), to which shares are added, or
  float *dk_partials, *dv_partials;  // (lists, max_keys, ..) from list_begin on; or NULL
  int32_t list_begin, num_lists;     // of this call
  int32_t heads_q, heads_kv, group, max_keys;
  int32_t k_chunks, v_chunks;  // of 16 bytes, in a row
  int32_t head_dim, head_dim_v;
  float scale, scale_log2;
};

}  // namespace magi
