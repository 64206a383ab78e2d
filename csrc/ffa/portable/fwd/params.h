// SPDX-License-Identifier: Apache-2.0
// What the forward kernel is launched with.
#pragma once

#include <cstdint>

#include "magi/abi.h"

namespace magi::portable {

struct FwdKernelParams {
  const void *q, *k, *v;
  int64_t q_stride_token, q_stride_head;  // elements
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  const int32_t* plan;
  int32_t* workspace;  // [0] work tile counter, [1] CTAs that are done, from kArrivalsAt the parts
                       // that are done
  float* partials;     // of tiles that are cut, see fwd/combine.cuh
  void* out;
  float* lse;
  float* max_logits;
  const float* sink;
  int64_t out_stride_token, out_stride_head;      // elements
  int32_t total_q, total_k, heads_q, head_units;  // head units = heads_q / pack
  int32_t pack, pack_log2, tile_tokens, num_tiles, head_dim, head_dim_v;
  int32_t kv_head_of_head_unit;  // kv head = head unit / this
  int32_t max_parts;             // into which a tile may be cut along the keys
  int32_t heads_per_l2_group;    // head units whose keys and values are kept in L2 together
  int32_t sink_count, sink_per_row;
  int32_t out_is_float, accumulate;
  float scale;       // of raw scores before softcap, or 1
  float scale_log2;  // of the (capped) score, times log2(e)
  float unscale;     // 1 / scale_log2
  float slack;  // by which a score may exceed the reference of its row; 0 where the maximum itself
                // is asked for
  int32_t has_softcap;
  magi_dropout dropout;  // without positions: none
};

}  // namespace magi::portable
