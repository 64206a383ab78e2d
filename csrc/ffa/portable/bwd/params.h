// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward are launched with.
#pragma once

#include <cstdint>

#include "magi/abi.h"

namespace magi::portable {

struct BwdKernelParams {
  const void *q, *k, *v, *out, *dout;
  int64_t q_stride_token, q_stride_head;  // elements
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t dout_stride_token, dout_stride_head;
  const float* lse;
  float* delta;
  const int32_t* plan;
  int32_t* counter;    // of work tiles, zero at the start
  int32_t* semaphore;  // of each head and block of queries: 1 + the last tile that has added to dq;
                       // zero at the start; or NULL
  float* dq_accum;     // of each head and block, in the order of fragments; zero at the start
  float*
      stats;  // of each head and block: offsets of the exponents (base 2) of its rows, then delta
  void *dq, *dk, *dv;                      // dk and dv: of the call, or the parts of head splits
  int64_t dk_stride_part, dv_stride_part;  // elements
  int32_t total_q, total_k, heads_q, heads_kv;
  int32_t head_units;  // kv heads times num_head_splits
  int32_t head_dim, head_dim_v;
  int32_t num_tiles, num_m_blocks;
  int32_t heads_per_l2_group;           // head units
  int32_t group;                        // query heads of a kv head
  int32_t num_head_splits;              // among which work tiles share out those
  int32_t grads_are_float, accumulate;  // of dk and dv as the main kernel writes them
  int32_t dq_is_float, dq_accumulate;
  float scale;       // of raw scores before softcap, or 1
  float scale_log2;  // of the (capped) score, times log2(e)
  float grad_scale;
  int32_t has_softcap;
  magi_dropout dropout;  // without positions: none
  // P has the factor of dropout in its exponent, so dP and delta go without it; 0 and 1 for none.
  float dropout_log2_scale, dropout_inverse_scale;
};

}  // namespace magi::portable
