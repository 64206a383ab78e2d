// SPDX-License-Identifier: Apache-2.0
// Scalars of a forward call. P is what a forward kernel is launched with.
#pragma once

#include "ffa/common/host.h"
#include "ffa/common/part.cuh"
#include "ffa/common/scores.cuh"
#include "magi/abi.h"

namespace magi {

// Which tiles are split along the keys: the first `tiles` of the order, each into `parts` at most,
// of `blocks` key blocks of 128 at least. Without any, 0 tiles and 1 part.
struct FwdSplits {
  int32_t tiles = 0, parts = 1, blocks = kBlocksOfPart;

  template <typename P>
  void apply(P* k) const {
    k->split_tiles = tiles;
    k->max_parts = parts;
    k->split_blocks = blocks;
  }
};

// Those that the caller asks for, who knows the mask; else of all tiles where there is more than
// one SM for each. The same on a device whatever is left free, so that sm_margin does not change
// results. `slots`: how many split tiles, each for one head unit, the workspace can count.
inline magi_status fwd_splits(const magi_ffa_fwd_params& a, int sms, int slots, FwdSplits* splits) {
  const int64_t tiles = (static_cast<int64_t>(a.total_q) + a.tile_tokens - 1) / a.tile_tokens;
  const int64_t head_units = a.heads_q / a.pack, work_tiles = tiles * head_units;
  if (a.split_tiles != 0) {
    const int64_t split = a.split_tiles * head_units;
    if (a.split_tiles < 0 || a.split_tiles > tiles || split > slots || a.split_parts < 2 ||
        a.split_parts > kMaxParts || a.split_blocks < kBlocksOfPart ||
        split * a.split_parts > kMostSplitWork)
      return fail(
          MAGI_INVALID_ARGUMENT,
          "%d tiles split into up to %d parts of %d blocks: give at most %lld tiles for %lld "
          "head units, 2 to %d parts and %d blocks or more.",
          a.split_tiles, a.split_parts, a.split_blocks,
          (long long)(slots / head_units < tiles ? slots / head_units : tiles),
          (long long)head_units, kMaxParts, kBlocksOfPart);
    *splits = {a.split_tiles, a.split_parts, a.split_blocks};
    return MAGI_OK;
  }
  const int64_t parts = work_tiles < 1 ? 1 : sms / work_tiles;
  if (parts > 1 && work_tiles <= slots)
    *splits = {static_cast<int32_t>(tiles),
               static_cast<int32_t>(parts < kMaxParts ? parts : kMaxParts), kBlocksOfPart};
  return MAGI_OK;
}

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
