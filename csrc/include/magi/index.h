/* SPDX-License-Identifier: Apache-2.0
 *
 * Index attention: queries see a list of keys of their own. In libraries of Hopper kernels.
 *
 * A list belongs to q_block query tokens that follow one another and a kv head; all query heads of
 * that kv head share it. It names blocks of k_block keys, entry e the keys from start + e * k_block
 * on, where start is that of the tokens in k_starts, or 0. Lists are int32 (lists, heads_kv,
 * max_entries) for ceil(total_q / q_block) lists: ascending, each entry once, the unused end of any
 * value. key_counts (lists, heads_kv) says how many keys each list sees, which are the first of
 * those that it names: of the last blocks a part may be behind the end. All of them are below
 * total_k.
 *
 * Rows of one list, tokens times query heads of a kv head: up to 64 or a multiple of 64 where the
 * heads divide 64; else one token, of up to 128 heads.
 */
#ifndef MAGI_INDEX_H
#define MAGI_INDEX_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* q (total_q, heads_q, d), k (total_k, heads_kv, d), v (total_k, heads_kv, dv), dv at most the tile
 * of d, all 16-bit, last dim contiguous, other strides in elements; bases and strides are multiples
 * of 16 bytes. v NULL: the values are the first dv columns of k, as in MLA. out (total_q, heads_q,
 * dv) in the same dtype; lse (total_q, heads_q) float32, contiguous. */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t dtype;   /* MAGI_BF16 or MAGI_FP16 */
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t q_block, k_block;
  int32_t max_entries; /* of each list */
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
  const int32_t* lists;      /* device memory */
  const int32_t* key_counts; /* device memory */
  const int32_t* k_starts;   /* device memory: (lists,), or NULL */
  void* stream;              /* cudaStream_t */
} magi_ffa_index_fwd_params;

MAGI_EXPORT magi_status magi_ffa_index_fwd(const magi_ffa_index_fwd_params* params);

/* The same where keys come in blocks of a multiple of 16, the query heads of a kv head divide 64,
 * and the rows of a list are a multiple of 128, without k_starts: whole blocks are copied. */
typedef struct {
  int32_t version;
  int32_t dtype;
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v; /* tokens and keys > 0 */
  int32_t q_block, k_block;
  int32_t max_entries;
  int32_t sm_margin;
  float softmax_scale;
  int32_t reserved;
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  const void *q, *k, *v;
  void* out;
  float* lse;
  const int32_t* lists;
  const int32_t* counts; /* device memory (lists, heads_kv): entries of each list */
  int32_t* workspace;    /* device memory: 1 + lists * heads_kv words */
  void* stream;
} magi_ffa_index_fwd_blocks_params;

MAGI_EXPORT magi_status magi_ffa_index_fwd_blocks(const magi_ffa_index_fwd_blocks_params* params);

/* Into how many tiles the rows of a list are cut; 0 if there is no kernel for such lists. has_v 0:
 * where the values are columns of k. */
MAGI_EXPORT int32_t magi_ffa_index_tiles(int32_t heads_q, int32_t heads_kv, int32_t q_block,
                                         int32_t has_v);

/* 1 if this library has kernels of both directions for the dtype and head dims, else 0; has_v 0:
 * where the values are columns of k. */
MAGI_EXPORT int32_t magi_ffa_index_has_variant(int32_t dtype, int32_t head_dim, int32_t head_dim_v,
                                               int32_t has_v);

/* Gradients of the forward, of lists list_begin to before list_end of every kv head. dq (total_q,
 * heads_q, d) is contiguous, in the dtype of q. The sums dk (total_k, heads_kv, d) and dv (total_k,
 * heads_kv, dv) are float32, contiguous, multiples of 16 bytes; dk still lacks the softmax scale.
 * With partials NULL, they are added to in any order. Else every key of a list leaves shares of its
 * own, dk (keys, d) and dv (keys, dv) of the (list_end - list_begin, heads_kv, tiles, max_entries *
 * k_block) keys that these name, for magi_ffa_index_sum to add in a fixed order; those that are not
 * seen are not written. v NULL: dv and dv_partials are NULL, and dk is complete, with the gradient
 * of the values in its first columns. */
typedef struct {
  int32_t version;
  int32_t dtype;
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t q_block, k_block;
  int32_t max_entries;
  int32_t sm_margin;
  int32_t list_begin, list_end;
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
  const int32_t* key_counts;
  const int32_t* k_starts;
  void* stream;
} magi_ffa_index_bwd_params;

MAGI_EXPORT magi_status magi_ffa_index_bwd(const magi_ffa_index_bwd_params* params);

/* The same where queries come in blocks of a multiple of 64 and keys in blocks of a multiple of 16,
 * without k_starts, of all lists: keys stay with a CTA and not queries, so dk and dv are complete,
 * in the dtype of q, and contiguous. Up to 255 query heads share a kv head, whose gradients are
 * computed in num_head_splits parts (1: all heads at once; longer lists in up to 8). dq is summed
 * in any order. The workspace lies at a multiple of 128 bytes. */
typedef struct {
  int32_t version;
  int32_t dtype;
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t q_block, k_block;
  int32_t max_entries;
  int32_t sm_margin;
  int32_t num_head_splits;
  float softmax_scale;
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t dout_stride_token, dout_stride_head;
  int64_t workspace_bytes;
  const void *q, *k, *v;
  const void* out; /* or NULL: then delta is read */
  const void* dout;
  const float* lse; /* (total_q, heads_q) */
  float* delta;     /* (total_q, heads_q), sum(out * dout) of each row: written if out is given; or
                       NULL */
  void *dq, *dk, *dv;
  const int32_t* lists;
  const int32_t* counts; /* device memory (lists, heads_kv): entries of each list */
  void* workspace;
  void* stream;
} magi_ffa_index_bwd_keys_params;

MAGI_EXPORT magi_status magi_ffa_index_bwd_keys(const magi_ffa_index_bwd_keys_params* params);

/* Bytes that it needs; addresses are not looked at. */
MAGI_EXPORT magi_status
magi_ffa_index_bwd_keys_workspace(const magi_ffa_index_bwd_keys_params* params, int64_t* bytes);

/* Adds the shares that lists list_begin to before list_end left of each key to its row of sums,
 * (total_k, heads_kv, width) float32, from left to right: by the first key of the block that has
 * it, then by list, then by tile. partials are those that magi_ffa_index_bwd wrote of these lists.
 *
 * Blocks begin at every k_block-th key or, where has_starts, at any. reader_begins (such keys,
 * heads_kv, and one more) says where in readers those of a block begin, which are places among the
 * (lists, heads_kv, max_entries), ascending. Keys of a block from key_counts on are not seen. */
typedef struct {
  int32_t version;
  int32_t total_k, heads_kv, k_block;
  int32_t max_entries;
  int32_t num_tiles; /* as of magi_ffa_index_tiles */
  int32_t width;     /* of a row, a multiple of 4 */
  int32_t has_starts;
  int32_t list_begin, list_end;
  const int32_t *readers, *reader_begins;
  const int32_t* key_counts;
  const float* partials;
  float* sums;
  void* stream;
} magi_ffa_index_sum_params;

MAGI_EXPORT magi_status magi_ffa_index_sum(const magi_ffa_index_sum_params* params);

/* Lists as the kernels read them. indices: of magi_ffa_index_prepare the lists in any order, int32
 * or int64 (num_lists, heads_kv, max_entries) where those below 0 and those that begin at total_k
 * or behind are none, and one that is there twice counts once; of magi_ffa_index_blocks one byte
 * for each block (num_lists, heads_kv, max_entries), 0 for none. lists and counts (entries of each)
 * are written. num_words: for the library. */
typedef struct {
  int32_t version;
  int32_t num_lists, heads_kv, max_entries;
  int32_t total_k, k_block;
  int32_t is_int64;
  int32_t num_words;
  const void* indices;
  const int32_t* k_starts; /* (num_lists,), or NULL */
  int32_t* lists;          /* (num_lists, heads_kv, max_entries) */
  int32_t* counts;         /* (num_lists, heads_kv) */
  void* stream;
} magi_ffa_index_prepare_params;

/* MAGI_UNSUPPORTED where more entries are possible than shared memory has bits. */
MAGI_EXPORT magi_status magi_ffa_index_prepare(const magi_ffa_index_prepare_params* params);
MAGI_EXPORT magi_status magi_ffa_index_blocks(const magi_ffa_index_prepare_params* params);

/* The indexer: of the keys that a query sees, the num_best with the highest scores sum_h weights[h]
 * * relu(q_h . k), ascending, then -1. Of equal scores the first keys are taken. q (total_q, heads,
 * d), k (total_k, d) 16-bit, last dim contiguous, strides in elements; bases and strides are
 * multiples of 16 bytes. Up to 64 heads of 128 columns, and 4,096 best keys.
 *
 * With block_size > 0 the same of blocks of so many keys, counted from k_start. A block has the
 * score of its best key that the query sees; for the last local_blocks of the query that is
 * infinity. With weights NULL each head has a list of its own, by scores q_h . k; else num_lists is
 * 1. */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t dtype;   /* MAGI_BF16 or MAGI_FP16 */
  int32_t total_q, total_k, heads, head_dim;
  int32_t num_best;
  int32_t block_size;   /* keys of a block; 0: lists of keys */
  int32_t local_blocks; /* <= num_best */
  int32_t chunk;        /* queries whose scores are in memory at a time */
  int64_t q_stride_token, q_stride_head, k_stride_token;
  const void *q, *k;
  const float* weights;           /* (total_q, heads), contiguous; or NULL, with blocks */
  const int64_t *k_start, *k_end; /* (total_q,): first key, and the one behind the last; clamped */
  void* scratch;  /* 4 bytes each for (chunk, total_k rounded up to 128), or for (chunk, num_lists,
                     blocks of total_k rounded up to 4), at a multiple of 16 bytes */
  int32_t* lists; /* (total_q, num_lists, num_best) */
  void* stream;
} magi_ffa_indexer_params;

MAGI_EXPORT magi_status magi_ffa_indexer_topk(const magi_ffa_indexer_params* params);

/* The divergence of the indexer's softmax from the targets, of the keys in the list of each query.
 * A target is the sum over heads of exp(softmax_scale * q_h . k - lse_h), divided by the sum over
 * the list. q_index (total_q, heads_index, d), k_index (total_k, d) and weights as of
 * magi_ffa_indexer_topk; q (total_q, heads_q, d) and k (total_k, heads_kv * d) are those of
 * attention in the same dtype, up to 128 query heads and, in all kv heads together, 576 columns, or
 * 2,304 where up to 16 query heads share a kv head; with several kv heads d is a multiple of 64,
 * and up to 64 query heads share one. lists (total_q, max_entries) and counts are as of
 * magi_ffa_index_prepare. Written: targets (total_q, max_entries) float32 before the division,
 * where lists have keys; the divergence, the logsumexp of the scores and the sum of the targets of
 * each query. These are 0, of no meaning and 0 where lse is -inf or the list is empty; then the
 * targets are not written, and nothing else of the query is read. */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t dtype;   /* MAGI_BF16 or MAGI_FP16 */
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, heads_index, head_dim_index;
  int32_t max_entries;
  int32_t sm_margin;
  float softmax_scale;
  int64_t q_stride_token, q_stride_head, k_stride_token;
  int64_t q_index_stride_token, q_index_stride_head, k_index_stride_token;
  const void *q, *k;
  const float* lse; /* (total_q, heads_q), contiguous */
  const void *q_index, *k_index;
  const float* weights;
  const int32_t *lists, *counts;
  float* targets;
  float *divergence, *lse_index, *mass; /* (total_q,) */
  void* stream;
} magi_ffa_indexer_kl_fwd_params;

MAGI_EXPORT magi_status magi_ffa_indexer_kl_fwd(const magi_ffa_indexer_kl_fwd_params* params);

/* Its gradients, of queries query_begin to before query_end, from what the forward wrote and grad
 * (total_q,), those of the divergences. dq_index is contiguous, in the dtype of q_index; dweights
 * (total_q, heads_index) and the sums dk_index (total_k, d) are float32. With dk_partials NULL they
 * are added to in any order; else each key of a list leaves its share in dk_partials (query_end -
 * query_begin, max_entries, d), for magi_ffa_index_sum to add in a fixed order. Those of queries
 * without targets are not written. */
typedef struct {
  int32_t version;
  int32_t dtype;
  int32_t total_q, total_k, heads_index, head_dim_index;
  int32_t max_entries;
  int32_t sm_margin;
  int32_t query_begin, query_end;
  int64_t q_index_stride_token, q_index_stride_head, k_index_stride_token;
  const void *q_index, *k_index;
  const float* weights;
  const int32_t *lists, *counts;
  const float *targets, *lse_index, *mass, *grad;
  void* dq_index;
  float *dk_index, *dk_partials, *dweights;
  void* stream;
} magi_ffa_indexer_kl_bwd_params;

MAGI_EXPORT magi_status magi_ffa_indexer_kl_bwd(const magi_ffa_indexer_kl_bwd_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_INDEX_H */
