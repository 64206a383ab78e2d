// SPDX-License-Identifier: Apache-2.0
// Scalars of a forward call. P is what a forward kernel is launched with.
#pragma once

#include "ffa/common/scores.cuh"
#include "magi/abi.h"

namespace magi {

// Key and value bytes of the heads that are worked on together; the rest of L2 is for queries and
// outputs. A little more than a power of two, for keys that are a little more than that.
constexpr int64_t kL2GroupBytes = 33ll << 20;

// What both kinds of forward kernels are told of a call. `partials` begin so many words into the
// workspace.
template <typename P>
void fwd_scalars(const magi_ffa_fwd_params& a, int partials_at, P* k) {
  k->plan = a.plan;
  k->workspace = a.workspace;
  k->partials = reinterpret_cast<float*>(a.workspace + partials_at);
  k->out = a.out;
  k->lse = a.lse;
  k->max_logits = a.max_logits;
  k->sink = a.sink;
  k->out_stride_token = a.out_stride_token;
  k->out_stride_head = a.out_stride_head;
  k->total_q = a.total_q;
  k->heads_q = a.heads_q;
  k->head_units = a.heads_q / a.pack;
  k->pack = a.pack;
  k->tile_tokens = a.tile_tokens;
  k->num_tiles =
      static_cast<int>((static_cast<int64_t>(a.total_q) + a.tile_tokens - 1) / a.tile_tokens);
  k->head_dim_v = a.head_dim_v;
  k->kv_head_of_head_unit = k->head_units / a.heads_kv;
  const int64_t head_bytes = 2ll * a.total_k * (a.head_dim + a.head_dim_v);
  const int64_t fitting = kL2GroupBytes / (head_bytes > 0 ? head_bytes : 1);
  const int64_t heads = (fitting < 1 ? 1 : fitting) * k->kv_head_of_head_unit;
  k->heads_per_l2_group = heads < k->head_units ? static_cast<int>(heads) : k->head_units;
  k->sink_count = a.sink != nullptr ? a.sink_count : 0;
  k->sink_per_row = a.sink_per_row;
  k->out_is_float = a.out_dtype == MAGI_FP32;
  k->accumulate = a.accumulate;
  k->has_softcap = a.softcap > 0.f;
  k->scale = k->has_softcap ? a.softmax_scale / a.softcap : 1.f;
  k->scale_log2 = (k->has_softcap ? a.softcap : a.softmax_scale) * kLog2e;
  k->unscale = 1.f / k->scale_log2;
  // P must fit its type: bf16 reaches as far as float32, fp16 ends at 2^16.
  const float slack_log2 = a.max_logits != nullptr ? 0.f : a.dtype == MAGI_BF16 ? 32.f : 8.f;
  k->slack = slack_log2 * k->unscale;
  k->dropout = a.dropout != nullptr ? *a.dropout : magi_dropout{};
}

}  // namespace magi
