/* SPDX-License-Identifier: Apache-2.0
 *
 * Index attention: every query row sees a list of keys of its own. In libraries of Hopper kernels.
 *
 * A list belongs to a query token and a kv head, and all query heads of that kv head share it: up
 * to 128, which are the rows of one work tile. Lists are int32 (total_q, heads_kv, max_keys): keys
 * by token, each once and below total_k, the unused end of any value; counts (total_q, heads_kv)
 * says how many are used.
 */
#ifndef MAGI_INDEX_H
#define MAGI_INDEX_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* q (total_q, heads_q, d), k (total_k, heads_kv, d), v (total_k, heads_kv, dv), dv at most the tile
 * of d, all 16-bit, last dim contiguous, other strides in elements; bases and strides are multiples
 * of 16 bytes. out (total_q, heads_q, dv) in the same dtype; lse (total_q, heads_q) float32,
 * contiguous. */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t dtype;   /* MAGI_BF16 or MAGI_FP16 */
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t max_keys;    /* entries of each list */
  int32_t sm_margin;   /* SMs to leave free, >= 0 */
  float softmax_scale; /* > 0 */
  int32_t reserved;
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  const void *q, *k, *v;
  void* out;
  float* lse;
  const int32_t* lists;  /* device memory */
  const int32_t* counts; /* device memory */
  void* stream;          /* cudaStream_t */
} magi_ffa_index_fwd_params;

MAGI_EXPORT magi_status magi_ffa_index_fwd(const magi_ffa_index_fwd_params* params);

/* 1 if this library has kernels of both directions for the dtype and head dims, else 0. */
MAGI_EXPORT int32_t magi_ffa_index_has_variant(int32_t dtype, int32_t head_dim, int32_t head_dim_v);

/* Gradients of the forward, of tokens token_begin to token_end of the queries. dq (total_q,
 * heads_q, d) is contiguous, in the dtype of q. The sums dk (total_k, heads_kv, d) and dv (total_k,
 * heads_kv, dv) are float32, contiguous, multiples of 16 bytes; dk still lacks the softmax scale.
 * With partials NULL, they are added to in any order. Else every list entry leaves its own share,
 * dk (entries, d) and dv (entries, dv) of the (token_end - token_begin, heads_kv, max_keys) entries
 * of these tokens, for magi_ffa_index_sum to add in a fixed order; shares of unused entries are not
 * written. */
typedef struct {
  int32_t version;
  int32_t dtype;
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t max_keys;
  int32_t sm_margin;
  int32_t token_begin, token_end;
  float softmax_scale;
  int32_t reserved;
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t dout_stride_token, dout_stride_head;
  const void *q, *k, *v;
  const void* out; /* or NULL: then delta is read */
  const void* dout;
  const float* lse; /* (total_q, heads_q) */
  float* delta; /* (total_q, heads_q), sum(out * dout) of each row: written, of all tokens, if out
                   is given */
  void* dq;
  float *dk, *dv;
  float *dk_partials, *dv_partials; /* or NULL, both */
  const int32_t* lists;
  const int32_t* counts;
  void* stream;
} magi_ffa_index_bwd_params;

MAGI_EXPORT magi_status magi_ffa_index_bwd(const magi_ffa_index_bwd_params* params);

/* sums[row] += partials[entries[begins[row]]] + ... + partials[entries[begins[row + 1] - 1]], from
 * left to right, rows of `width` float32, a multiple of 4. */
typedef struct {
  int32_t version;
  int32_t num_rows, width, reserved;
  const int32_t* begins;  /* device: (num_rows + 1,) */
  const int32_t* entries; /* device: rows of partials */
  const float* partials;
  float* sums; /* (num_rows, width) */
  void* stream;
} magi_ffa_index_sum_params;

MAGI_EXPORT magi_status magi_ffa_index_sum(const magi_ffa_index_sum_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_INDEX_H */
