/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI between Python and the native libraries. No torch, no C++ types: raw pointers and
 * versioned POD structs. The caller allocates everything, workspace included. Functions return a
 * status; the reason is magi_last_error() of the calling thread.
 */
#ifndef MAGI_ABI_H
#define MAGI_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MAGI_ABI_VERSION 31
#define MAGI_EXPORT __attribute__((visibility("default")))

typedef enum {
  MAGI_OK = 0,
  MAGI_INVALID_ARGUMENT = 1, /* the caller broke a documented rule */
  MAGI_UNSUPPORTED = 2,      /* no variant for this shape, dtype or device */
  MAGI_CUDA_ERROR = 3,       /* the driver or runtime reported an error */
  MAGI_CAPACITY = 4 /* a buffer given by the caller is too small; the needed size is reported */
} magi_status;

typedef enum { MAGI_BF16 = 0, MAGI_FP16 = 1, MAGI_FP32 = 2 } magi_dtype;
typedef enum { MAGI_FWD = 0, MAGI_BWD = 1 } magi_kind;

/* ---- tile plan of the forward
 * ------------------------------------------------------------------------
 *
 * A tile is `tile_tokens` consecutive query tokens (the last one may be short). Its work is a list
 * of segments. In one segment every token sees at most one key interval [lo, hi); tokens without
 * one have lo == hi == 0. All segments of a tile together hold every allowed pair of the tile
 * exactly once.
 *
 * Layout in memory, int32 words, one buffer:
 *   header  28 words  magi_tile_plan_header
 *   tiles   8 words each, num_tiles of them: magi_tile_desc
 *   order   num_tiles words: tile ids by decreasing cost (ties: lower id first); of plans with work
 * tiles possibly another order records segment_words each, at words_records: magi_tile_segment,
 * then tile_tokens pairs (lo, hi) L2 groups start at multiples of 16 bytes; segment_words is a
 * multiple of 4.
 */
#define MAGI_KEY_BLOCK_SIZES 5

typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t total_q; /* tokens */
  int32_t total_k;
  int32_t tile_tokens;   /* query tokens per tile */
  int32_t num_groups;    /* row groups per tile, one per consumer warpgroup: 1..3 */
  int32_t num_tiles;     /* ceil(total_q / tile_tokens) */
  int32_t num_segments;  /* records in use */
  int32_t segment_words; /* 32 + 2 * tile_tokens, rounded up to a multiple of 4 */
  int32_t words_tiles;   /* offsets in words from the start of the buffer */
  int32_t words_order;
  int32_t words_records;
  int32_t words_total;       /* size of the buffer in words */
  int32_t status;            /* 0, or MAGI_CAPACITY if the records did not fit (device producer) */
  int32_t has_unseen;        /* 1 if some key in [0, total_k) is seen by no query */
  int32_t words_first_order; /* offset of another order, for the heads that come first; 0: they take
                                the same */
  int32_t words_work_tiles;  /* of the work tiles of a backward in steps of 80, magi_work_tile
                           (magi/schedule.h) in the order in which they are taken up; 0: none. With a
                           dq_mode only whether there are some counts: then `order` is one document
                           after the other, and tiles are walked from the end
                         */
  int64_t num_key_blocks[MAGI_KEY_BLOCK_SIZES]; /* that all segments make, with blocks of 64, 80,
                                                   96, 112 and 128 keys */
  int32_t reserved[2];
} magi_tile_plan_header;

typedef struct {
  int32_t token0;        /* first query token */
  int32_t num_tokens;    /* 1..tile_tokens */
  int32_t segment_begin; /* index of the first record */
  int32_t num_segments;
  int32_t cost;       /* model cost, see planner; decides the order only */
  int32_t num_blocks; /* key blocks of 128 over all segments */
  int32_t reserved[2];
} magi_tile_desc;

/* Ranges are half-open, in key tokens. Group g holds tokens [g * tile_tokens / num_groups, ...). A
 * key block inside [full_lo, full_hi) of a group needs no masking for any of its tokens (so tokens
 * without an interval make it empty: full_lo >= full_hi); one outside [visit_lo, visit_hi) needs no
 * work at all. */
typedef struct {
  int32_t visit_lo, visit_hi; /* of the whole tile */
  int32_t source;             /* which key tensor map; 0, local rows: others are not used yet */
  int32_t arrival;            /* of the keys; -1, none: not used yet */
  int32_t has_unseen;         /* 1 if a block of this segment may touch a key that no query sees */
  int32_t reserved[3];
  struct {
    int32_t visit_lo, visit_hi, full_lo, full_hi;
  } group[3];
  int32_t reserved2[12];
} magi_tile_segment; /* 32 words */

/* Words of a plan buffer for that many segments; -1 for bad arguments. */
MAGI_EXPORT int64_t magi_tile_plan_words(int32_t total_q, int32_t tile_tokens,
                                         int64_t num_segments);

/* Host producer. slices: num_slices rows of 5 int32 (q_start, q_end, k_start, k_end, type),
 * disjoint, in host memory. plan may be NULL to ask for *words_needed only. MAGI_CAPACITY if
 * plan_words is too small. */
MAGI_EXPORT magi_status magi_tile_plan_host(const int32_t* slices, int64_t num_slices,
                                            int32_t total_q, int32_t total_k, int32_t tile_tokens,
                                            int32_t num_groups, int32_t* plan, int64_t plan_words,
                                            int64_t* words_needed);

/* Walks a plan (host memory) against the slices: every allowed pair visited exactly once, nothing
 * else unmasked, and visit, full and order consistent. On a fault returns MAGI_INVALID_ARGUMENT and
 * says which pair or field. */
MAGI_EXPORT magi_status magi_tile_plan_check(const int32_t* slices, int64_t num_slices,
                                             const int32_t* plan, int64_t plan_words);

MAGI_EXPORT const char* magi_last_error(void);
MAGI_EXPORT int32_t magi_abi_version(void);
/* What the library was built from and with, as JSON; the fields are those of
 * magi_attention/native/info.py. */
MAGI_EXPORT const char* magi_build_info(void);

/* ---- variants
 * ----------------------------------------------------------------------------------------
 *
 * A library of attention kernels may hold any of them. 1 if this one has a kernel of that kind
 * (magi_kind) and dtype whose tile holds these head dims, so that a call finds it; 0 if not, or for
 * a kind, dtype or head dim that there is not. */
MAGI_EXPORT int32_t magi_ffa_has_variant(int32_t kind, int32_t dtype, int32_t head_dim,
                                         int32_t head_dim_v);

/* ---- keys of other ranks
 * -----------------------------------------------------------------------------
 *
 * Attention over keys in two places, in one launch: `local_keys` keys of k and v, and `rows` keys
 * that other ranks put into this rank's buffer (include/magi/symm.h) meanwhile. In the plan's
 * coordinates, so also in total_k, local keys come first, remote ones from `base` on, in tiles of
 * 128 rows that have one owner each; between them nothing is seen. Before the kernel reads a tile
 * it waits for the arrival signal of the tile's stage. magi_ffa_fwd_remote and magi_ffa_bwd_remote
 * of include/magi/symm.h launch it.
 */

/* Memory that all ranks can address, as one rank sees it. */
typedef struct {
  void* own;              /* address of this rank's */
  const int64_t* of_rank; /* device memory: (world,) addresses of all ranks' */
} magi_symm_buffer;

typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t rank, world;
  int32_t local_keys; /* rows of k and v */
  int32_t base;       /* a multiple of 128, at least local_keys + 128 */
  int32_t
      rows; /* a multiple of 128, or 0 for a rank that reads only its own; total_k is base + rows */
  int32_t wire_dtype;  /* backward: of remote dk and dv, the dtype of k or MAGI_FP32 */
  uint32_t timeout_ms; /* as in include/magi/symm.h */
  int32_t num_signals;
  int32_t reserved;
  magi_symm_buffer buffer; /* its control words say what has arrived; the forward ends this epoch
                              of it, into which this rank put */
  const void *k,
      *v; /* (rows, heads_kv, d) and (rows, heads_kv, dv), contiguous, multiples of 16 bytes */
  const int32_t* arrivals; /* device: (rows / 128,) stage of each tile; the forward waits for those
                              before it, too */
  int32_t* failed_peer;    /* as in include/magi/symm.h */
  /* Backward: dk and dv of remote tiles are written to their owners, who are told so when all are
   * there; those of other ranks are waited for, and then magi_symm_reduce can add them; of a tile
   * of 128 local keys to which other ranks add, to dk_sums and dv_sums in float32, all rows of it,
   * for magi_symm_reduce; of the other local tiles to dk and dv, which are 16 bits. */
  magi_symm_buffer grads; /* to which dk_targets and dv_targets belong */
  const int32_t*
      senders; /* device: (world,) 1 if that rank adds anything to gradients of this one */
  const int32_t* owners; /* device: (rows / 128,) rank of each tile */
  const int32_t*
      target_rows; /* device: (rows / 128,) first row of each tile in its owner's memory */
  const int64_t *dk_targets,
      *dv_targets;       /* device: (world,) addresses of row 0, (.., heads_kv, d) contiguous */
  const int32_t* summed; /* device: (local_keys / 128 rounded up,) which of the tiles in the sums,
                            -1: of none */
  float *dk_sums, *dv_sums; /* (.., 128, heads_kv, d) and (.., 128, heads_kv, dv), contiguous,
                               multiples of 16 bytes; of each call */
} magi_ffa_remote;

/* ---- attention dropout
 * -------------------------------------------------------------------------------
 *
 * A pair of a query at q_positions[row] and a key at k_positions[column] stays in head h if
 *   last(mix(mix(q_position ^ seed_q) ^ mix(h ^ seed_head)) ^ mix(k_position ^ seed_k)) >=
 * threshold, where mix is the finaliser of MurmurHash3 and last(x) = (y ^ y >> 15) * 0xc2b2ae35
 * with y = x * 0x85ebca6b, in 32 bits. The weights of pairs that stay, after the softmax, are
 * multiplied by scale, those of others are 0. lse and max_logits know nothing of it.
 */
typedef struct {
  const int32_t* q_positions; /* device: (total_q,) */
  const int32_t* k_positions; /* device: (total_k,) */
  uint32_t seed_q, seed_head, seed_k;
  uint32_t threshold; /* share of pairs that go, in units of 2^-32 */
  float scale;        /* > 0 */
  int32_t reserved;
} magi_dropout;

/* ---- FFA forward
 * -------------------------------------------------------------------------------------
 *
 * q (total_q, heads_q, d), k (total_k, heads_kv, d), v (total_k, heads_kv, dv), all 16-bit, last
 * dim contiguous, other strides in elements. out (total_q, heads_q, dv); lse (total_q, heads_q)
 * float32, contiguous.
 */
typedef struct {
  int32_t version;   /* MAGI_ABI_VERSION */
  int32_t dtype;     /* magi_dtype of q, k, v: MAGI_BF16 or MAGI_FP16 */
  int32_t out_dtype; /* the input dtype, or MAGI_FP32 */
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t pack;         /* query heads per tile row group: heads_q / heads_kv (PackGQA) or 1 */
  int32_t tile_tokens;  /* as in the plan */
  int32_t accumulate;   /* 1: merge with what out (float32) and lse already hold */
  int32_t sm_margin;    /* SMs to leave free, >= 0 */
  int32_t sink_count;   /* sinks per head, 0 for none */
  int32_t sink_per_row; /* 0: sink is (sink_count, heads_q), 1: (total_q, sink_count, heads_q);
                           float32 */
  float softmax_scale;  /* > 0 */
  float softcap;        /* > 0, or 0 for none */
  int32_t has_dropout;  /* 1: dropout is not NULL. Not with magi_ffa_fwd_remote */
  int32_t split_tiles;  /* the first so many tiles of the plan's order are split along the keys, */
  int32_t split_parts;  /* into 2 to 16 parts at most, */
  int32_t split_blocks; /* of so many key blocks of 128 or more, at least 4; all 0: the call decides
                           by its shapes, as portable kernels always do */
  int32_t reserved;
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t workspace_bytes; /* at least what magi_ffa_fwd_workspace says */
  const void *q, *k, *v;
  void* out;
  float* lse;
  float* max_logits;   /* (heads_q,), preset to -inf by the caller, or NULL */
  const float* sink;   /* or NULL */
  const int32_t* plan; /* device memory, 16-byte aligned */
  int32_t* workspace;  /* workspace_bytes, 16-byte aligned, zeroed once by the caller, reusable on
                          one stream */
  void* stream;        /* cudaStream_t */
  const magi_dropout* dropout; /* in host memory, read by the call; or NULL */
} magi_ffa_fwd_params;

/* The tiles that a kernel for these shapes takes: of *num_groups groups of 64 rows, and, unless
 * *few_groups is 0, smaller ones of so many, which are faster where there are few. A row is *pack
 * query heads of a token: a tile has 64 * groups / pack tokens. */
MAGI_EXPORT magi_status magi_ffa_fwd_tile(int32_t dtype, int32_t heads_q, int32_t heads_kv,
                                          int32_t head_dim, int32_t head_dim_v, int32_t* num_groups,
                                          int32_t* few_groups, int32_t* pack);
/* Bytes of workspace that a call with these shapes needs on the current device; pointers are not
 * looked at. Where there are fewer tiles than multiprocessors, long tiles are cut along the keys,
 * and the parts wait there to be combined. */
MAGI_EXPORT magi_status magi_ffa_fwd_workspace(const magi_ffa_fwd_params* params, int64_t* bytes);
MAGI_EXPORT magi_status magi_ffa_fwd(const magi_ffa_fwd_params* params);

/* ---- FFA backward
 * ------------------------------------------------------------------------------------
 *
 * Gradients of the forward, from its inputs, its out and lse and the gradient dout of out. The plan
 * is that of the transposed mask, so its rows are keys: magi_tile_transpose_* of the slices, then
 * magi_tile_plan_* with total_k rows and total_q columns. dq, dk and dv are contiguous, (total_q,
 * heads_q, d), (total_k, heads_kv, d), (total_k, heads_kv, dv). dk and dv are written once by their
 * owner (where tiles are few, by a sum of parts in a fixed order, which wait in the workspace); dq
 * is summed in float32 in the workspace, in the order of `dq_mode`.
 */
typedef enum {
  MAGI_DQ_ATOMIC = 0, /* the sum is cleared first; not with softcap or dropout */
  MAGI_DQ_DETERMINISTIC =
      1, /* an order that plan and sm_margin fix, so dq is the same bits on every run */
  MAGI_DQ_FIRST_WRITER = 2, /* the first writer of a block stores, so nothing is cleared */
} magi_dq_mode;
/* In deterministic order a kernel waits for CTAs of its own, so two of those must not run beside
 * each other. */
typedef struct {
  int32_t version;    /* MAGI_ABI_VERSION */
  int32_t dtype;      /* of q, k, v, out, dout: MAGI_BF16 or MAGI_FP16 */
  int32_t grad_dtype; /* of dq, dk, dv: the input dtype, or MAGI_FP32 */
  int32_t total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t accumulate;  /* 1: add to what dq, dk and dv (float32) already hold */
  int32_t sm_margin;   /* SMs to leave free, >= 0 */
  float softmax_scale; /* > 0 */
  float softcap;       /* > 0, or 0 for none */
  int32_t dq_mode;     /* magi_dq_mode */
  int32_t block_m; /* queries of a step: 64; or without softcap and dropout 80 for head dims of 65
                      to 128, faster where keys see thousands, and 128 for smaller ones and
                      MAGI_DQ_ATOMIC */
  int32_t num_head_splits; /* among how many work tiles the query heads of a tile are shared out, at
                         least; 0 leaves it to the library. With MAGI_DQ_ATOMIC some may have one
                         head more; else it divides them. In order, more than one says that tiles
                         are uneven: the longest of all heads come first */
  int32_t split_begin, split_end,
      splits_per_split_tile; /* MAGI_DQ_DETERMINISTIC and 80: the query heads of the tiles from
split_begin to before split_end, in the order of the plan, are shared out among so many work tiles,
2, 4 or 8, each of 1, 2, 4 ... heads; none: 0. Not with magi_ffa_bwd_remote, nor where those of all
tiles are shared out */
  int32_t
      direct_dq_store; /* 1: where a single segment of a single tile visits a block of queries its
                      dq is written at once, not by way of the sum: the same bits. Faster from a
                      tenth of the blocks on, else slower. Not with MAGI_DQ_ATOMIC, softcap, split
                      tiles, accumulate, grad_dtype MAGI_FP32 or magi_ffa_bwd_remote */
  int32_t has_dropout; /* 1: dropout is not NULL. As with softcap, steps are of 64, without
                          direct_dq_store; not with magi_ffa_bwd_remote */
  int64_t q_stride_token, q_stride_head;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t dout_stride_token, dout_stride_head;
  int64_t workspace_bytes; /* at least what magi_ffa_bwd_workspace says */
  const void *q, *k, *v;
  const void* out; /* or NULL: then delta is read */
  const void* dout;
  const float* lse; /* (total_q, heads_q) */
  float*
      delta; /* (total_q, heads_q), sum(out * dout) of each row: written if out is given; or NULL */
  void *dq, *dk, *dv;
  const int32_t* plan;      /* device memory, 16-byte aligned */
  void* workspace;          /* workspace_bytes, 128-byte aligned; need not be initialised */
  const int32_t* work_list; /* or NULL: magi_work_list of the plan (magi/schedule.h), device memory,
                               16-byte aligned, where magi_ffa_bwd_workspace says that the call
                               takes one; without it tiles stay whole, in the order of the plan */
  void* order; /* or NULL: kept by the caller for calls of one plan and one stream, with equal
                  values of all that is above the addresses, of as many bytes as
                  magi_ffa_bwd_workspace says, 128-byte aligned */
  int64_t order_is_made; /* 1: such a call was launched with this order before, so what it made need
                            not be made again; 0 is always right */
  void* stream;          /* cudaStream_t */
  const magi_dropout* dropout; /* that of the forward, in host memory, read by the call; or NULL */
} magi_ffa_bwd_params;

/* Tile the kernel wants: *tile_tokens keys in *num_groups groups, for the planner. */
MAGI_EXPORT magi_status magi_ffa_bwd_tile(int32_t head_dim, int32_t head_dim_v,
                                          int32_t* tile_tokens, int32_t* num_groups);
/* needs[0]: bytes of workspace that a call with these shapes needs; needs[1]: of its order, 0 if it
 * makes none; needs[2]: 1 if it takes a work list. needs[3], needs[4]: so many of the last
 * words_work_tiles, if the plan has any, are to be split into so many parts of their query heads:
 * first parts of all before second parts, partials from 0 on. Pointers are not looked at. */
MAGI_EXPORT magi_status magi_ffa_bwd_workspace(const magi_ffa_bwd_params* params, int64_t* needs);
MAGI_EXPORT magi_status magi_ffa_bwd(const magi_ffa_bwd_params* params);

/* The transposed mask, for the backward: slice i becomes up to three slices, 3i to 3i + 2, empty
 * ones with all zeros. Host: rows of 5 int32 as for magi_tile_plan_host. Device: int32 q_ranges (n,
 * 2), k_ranges (n, 2), types (n,) or NULL, to (3n, 2), (3n, 2) and (3n,); malformed slices become
 * empty. */
MAGI_EXPORT magi_status magi_tile_transpose_host(const int32_t* slices, int64_t num_slices,
                                                 int32_t* transposed);
MAGI_EXPORT magi_status magi_tile_transpose_device(const int32_t* q_ranges, const int32_t* k_ranges,
                                                   const int32_t* types, int32_t num_slices,
                                                   int32_t total_q, int32_t total_k,
                                                   int32_t* row_ranges, int32_t* column_ranges,
                                                   int32_t* new_types, void* stream);

/* The same mask with its FULL slices cut anew where a plan of it takes half the time then or less,
 * else as it is, empty slices left out. strips: room for three times as many rows; *num_strips: how
 * many are used. */
MAGI_EXPORT magi_status magi_tile_strips_host(const int32_t* slices, int64_t num_slices,
                                              int32_t tile_tokens, int32_t* strips,
                                              int64_t* num_strips);

/* Least weighted vertex cover of a bipartite graph: of each edge (left[e], right[e]) at least one
 * end is chosen, and the weights of those that are (0 to 2^60 each, 2^62 in all) add up to as
 * little as can be. */
MAGI_EXPORT magi_status magi_vertex_cover(int32_t num_left, int32_t num_right,
                                          const int64_t* left_weights, const int64_t* right_weights,
                                          int64_t num_edges, const int32_t* left,
                                          const int32_t* right, uint8_t* left_chosen,
                                          uint8_t* right_chosen);

/* Pairs of a query chunk and a key chunk that see each other, each once, ascending by query chunk
 * and then by key chunk. A rank that computes a pair is sent what it does not own of the two, each
 * chunk once for all of its pairs. Costs and areas are >= 0, in all at most 2^44 and 2^60. */
typedef struct {
  int64_t num_pairs;
  int32_t num_queries, num_keys; /* chunks */
  int32_t world;                 /* ranks */
  int32_t reserved;
  const int64_t* query; /* (num_pairs,): chunk */
  const int64_t* key;
  const int64_t* area;
  const int64_t* query_cost; /* (num_queries,): of sending a chunk to one rank */
  const int64_t* query_owner;
  const int64_t* key_cost; /* (num_keys,) */
  const int64_t* key_owner;
} magi_pairs;

/* Pairs go to other ranks, each alone or all that a rank has with one chunk. rank (num_pairs,): who
 * computes each, -1 for nobody yet, which stays. Balance takes, up to most_steps times, from the
 * rank with most area what costs least for its area, until none has more than `most` or nothing
 * helps. Improve hands over what saves most, while no rank that gets something has more than `most`
 * then, until nothing does. */
MAGI_EXPORT magi_status magi_balance_pairs(const magi_pairs* pairs, int64_t most,
                                           int64_t most_steps, int64_t* rank);
MAGI_EXPORT magi_status magi_improve_pairs(const magi_pairs* pairs, int64_t most, int64_t* rank);

/* Libraries of portable kernels only: whether GPUs whose CTAs may have 163 KB of shared memory or
 * more run the tiles of those that have 99 KB. For tests and comparisons; plans of the backward
 * made before belong to the other tiles. */
MAGI_EXPORT void magi_ffa_use_small_tiles(int32_t use);

/* Device producer of the tile plan: slices in device memory as int32 q_ranges (n, 2), k_ranges (n,
 * 2), types (n,) or NULL for all FULL. No host synchronisation; two kernels. Malformed slices (out
 * of range, end < start, unknown type) are ignored. One record per tile that a slice touches always
 * suffices, fewer usually do; if they do not fit into plan_words the header's status says so and
 * the attention kernel fills out and lse with NaN, as it does for a plan of other shapes. Beyond
 * some ten thousand slices has_unseen may be 1 without need. */
MAGI_EXPORT magi_status magi_tile_plan_device(const int32_t* q_ranges, const int32_t* k_ranges,
                                              const int32_t* types, int32_t num_slices,
                                              int32_t total_q, int32_t total_k, int32_t tile_tokens,
                                              int32_t num_groups, int32_t* plan, int64_t plan_words,
                                              void* stream);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_ABI_H */
