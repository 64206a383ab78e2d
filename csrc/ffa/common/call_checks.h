// SPDX-License-Identifier: Apache-2.0
// What every library refuses before it looks for a kernel.
#pragma once

#include "ffa/common/host.h"

namespace magi {

inline magi_status check_head_dims(int32_t head_dim, int32_t head_dim_v) {
  if (head_dim < 8 || head_dim % 8 || head_dim_v < 8 || head_dim_v % 8)
    return fail(MAGI_INVALID_ARGUMENT, "head dims %d and %d must be positive multiples of 8.",
                head_dim, head_dim_v);
  return MAGI_OK;
}

inline magi_status check_shapes(int32_t version, int32_t heads_q, int32_t heads_kv,
                                int32_t head_dim, int32_t head_dim_v) {
  if (version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", version,
                MAGI_ABI_VERSION);
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.", heads_q,
                heads_kv);
  return check_head_dims(head_dim, head_dim_v);
}

inline magi_status check_dropout(int32_t has_dropout, const magi_dropout* dropout) {
  // Questions for a workspace come without addresses.
  if (dropout == nullptr) return MAGI_OK;
  if (!has_dropout) return fail(MAGI_INVALID_ARGUMENT, "dropout is given; set has_dropout.");
  if (dropout->q_positions == nullptr || dropout->k_positions == nullptr || !(dropout->scale > 0.f))
    return fail(MAGI_INVALID_ARGUMENT, "dropout needs positions of both sides and a scale > 0.");
  return MAGI_OK;
}

// Before a launch.
template <typename Params>
magi_status check_dropout_is_given(const Params& p) {
  if (!p.has_dropout || p.dropout != nullptr) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT, "has_dropout is set and dropout is NULL; give it.");
}

// What both directions refuse; `result_dtype` is that of what they write, called `results`.
template <typename Params>
magi_status check_either(const Params& p, int32_t result_dtype, const char* results) {
  MAGI_RETURN(check_shapes(p.version, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v));
  if (!(p.softmax_scale > 0.f) || p.softcap < 0.f)
    return fail(MAGI_INVALID_ARGUMENT, "softmax_scale must be > 0 and softcap >= 0.");
  if (p.accumulate && result_dtype != MAGI_FP32)
    return fail(MAGI_INVALID_ARGUMENT, "accumulate needs float32 %s.", results);
  if (result_dtype != MAGI_FP32 && result_dtype != p.dtype)
    return fail(MAGI_INVALID_ARGUMENT, "%s must be float32 or have the dtype of q.", results);
  if (p.total_q < 0 || p.total_k < 0 || p.sm_margin < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q, total_k and sm_margin must be >= 0.");
  return check_dropout(p.has_dropout, p.dropout);
}

inline magi_status check_fwd(const magi_ffa_fwd_params& p) {
  MAGI_RETURN(check_either(p, p.out_dtype, "out"));
  if (p.pack != 1 && p.pack != p.heads_q / p.heads_kv)
    return fail(MAGI_INVALID_ARGUMENT, "pack is %d; choose 1 or heads_q / heads_kv.", p.pack);
  if (p.tile_tokens < 1)
    return fail(MAGI_INVALID_ARGUMENT, "tile_tokens is %d; ask magi_ffa_fwd_tile.", p.tile_tokens);
  return MAGI_OK;
}

inline magi_status check_bwd(const magi_ffa_bwd_params& p) {
  MAGI_RETURN(check_either(p, p.grad_dtype, "gradients"));
  if (p.dq_mode < MAGI_DQ_ATOMIC || p.dq_mode > MAGI_DQ_FIRST_WRITER)
    return fail(MAGI_INVALID_ARGUMENT, "dq_mode is %d; choose one of magi_dq_mode.", p.dq_mode);
  return MAGI_OK;
}

}  // namespace magi
