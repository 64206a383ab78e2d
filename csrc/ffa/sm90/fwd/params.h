// SPDX-License-Identifier: Apache-2.0
// What the forward kernel is launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/peer_kv.cuh"
#include "magi/abi.h"

namespace magi {

struct FwdKernelParams {
  // Q and out: (d, head in pack, token, head unit); K and V: (d, token, kv head).
  CUtensorMap q_map, out_map;
  CUtensorMap k_maps[2], v_maps[2];  // of copies of kBlockN and of kSmallBlockN keys
  const int32_t* plan;
  int32_t* workspace;  // [0] work tile counter, [1] CTAs that are done, [2] those that need no more
                       // remote keys, from kArrivalsAt the parts that are done
  float* partials;     // of tiles that are split, see fwd/combine.cuh
  void* out;
  float* lse;
  float* max_logits;
  const float* sink;
  int64_t out_stride_token, out_stride_head;  // elements
  int32_t total_q, heads_q, head_units;       // head units = heads_q / pack
  int32_t pack, tile_tokens, num_tiles, head_dim_v;
  int32_t kv_head_of_head_unit;  // kv head = head unit / this
  int32_t split_tiles;           // the first so many of the order are split along the keys,
  int32_t max_parts;             // each into at most so many parts
  int32_t split_blocks;          // of so many key blocks of 128 or more
  int32_t heads_per_l2_group;    // head units whose keys and values are kept in L2 together
  int32_t sink_count, sink_per_row;
  int32_t out_is_float, accumulate;
  float scale;       // of raw scores before softcap, or 1
  float scale_log2;  // of the (capped) score, times log2(e)
  float unscale;     // 1 / scale_log2
  float slack;  // by which a score may exceed the reference of its row; 0 where the maximum itself
                // is asked for
  int32_t has_softcap;
  int32_t allows_small_blocks;
  RemoteKeys remote;
  magi_dropout dropout;  // without positions: none
  int32_t total_k;
};

}  // namespace magi
