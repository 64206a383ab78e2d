// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward are launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/common/combine_heads.cuh"

#include "comm/symm/barrier.cuh"
#include "ffa/sm90/peer_kv.cuh"

namespace magi {

// With a work list: what is through, so that the last kernel can begin with what is complete. See
// bwd/rows/completion.cuh.
struct BwdCompletion {
  int32_t* left;  // (tile, kv head, part): work tiles that are not complete; whole ones and those
                  // split along the queries count for all parts
  int32_t* prepared;  // (block of queries, kv head): query heads that are prepared
};

struct BwdKernelParams {
  // All (d, token, head).
  CUtensorMap q_map, k_map, v_map, do_map, dk_map, dv_map;
  const int32_t* plan;  // of the transposed mask: its rows are keys, its columns queries
  int32_t* workspace;   // [0] work tile counter, [1] CTAs that are done; kPlaceWord and on
  float* stats;         // (head, block of queries, stat_floats)
  float* dq_accum;      // (head, block of queries, block of 64 columns, dq_block_floats)
  // Only where dq is summed in order: the semaphores, (head, block of queries); the semaphore
  // target of each work tile, (block of queries, table, tile, kv heads of an L2 group, parts of a
  // work tile); and the flags of the plan.
  int32_t* dq_semaphore;
  const int32_t* semaphore_targets;
  const int32_t* order;
  int32_t wave;  // tiles of which all work tiles can be in work at the same time
  int32_t targets_per_block,
      work_tiles_per_tile;  // of all tables, of an L2 group; of a tile that is split, if some are
  int32_t first_writer;     // the first writer, in place of semaphore targets
  // (total_k, heads_kv, head dim), contiguous; used where they are float32: of the caller, or one
  // for each part of the heads.
  void *dk, *dv;
  int64_t dk_stride_part, dv_stride_part;
  int32_t total_q, total_k, num_m_blocks;
  int32_t heads_q, heads_kv, head_dim, head_dim_v;
  int32_t head_units;  // kv heads
  int32_t num_tiles;
  int32_t heads_per_l2_group;  // kv heads whose queries are kept in L2 together
  int32_t splits_per_tile;  // into which the work for a tile and kv head is split, by query heads
  int32_t num_work_tiles, work_tiles_per_l2_group;
  int32_t group;  // query heads of a kv head
  int32_t num_head_splits, heads_per_split;
  int32_t longer_splits;  // with atomic dq so many parts, the first ones, have a head more
  int32_t grads_are_float, accumulate;
  float scale;       // of a raw score inside the softcap, or 1
  float scale_log2;  // of the (capped) score, times log2(e)
  float grad_scale;  // softmax_scale
  int32_t has_softcap;
  RemoteKeys remote;
  // Only where work tiles may be split: (part, partial, 128, head dim), float32. See
  // bwd/schedule/split.cuh.
  float *dk_split, *dv_split;
  int32_t num_partials, split_heads;  // query heads of a part
  const int32_t* work_list;           // magi_work_list; NULL: none
  int32_t prepare_groups;             // of warps that prepare the rows, if they are
  BwdCompletion completion;           // only if they are
  // In deterministic order, where some tiles are split: the first work tile of those; parts, and
  // query heads of a part, as powers of two.
  int32_t first_split, parts_shift, heads_shift;
  // Where dq of some blocks is written at once: of each block, kDirectStoreBit for those, else 0;
  // NULL for none. dq as (d, token, head).
  const int32_t* direct_dq_store;
  CUtensorMap dq_map;
  magi_dropout dropout;  // without positions: none
};

// The kernels before and after the main one.
struct BwdRowParams {
  const void *out, *dout;
  const float* lse;  // (total_q, heads_q)
  float* delta;      // (total_q, heads_q): written, or read where out is NULL
  float *stats, *dq_accum;
  int32_t* workspace;
  void* dq;  // (total_q, heads_q, head dim), contiguous
  const int32_t* plan;
  int64_t out_stride_token, out_stride_head, dout_stride_token, dout_stride_head;
  int32_t total_q, total_k, num_m_blocks, heads_q, head_dim, head_dim_v;
  int32_t dim_blocks;     // of 64 columns in dq_accum
  int32_t* dq_semaphore;  // as in BwdKernelParams; NULL: no order
  int32_t* semaphore_targets;
  // An earlier call of the plan has made order, semaphore targets, contributions_of_block,
  // direct_dq_store and summed.
  int32_t order_is_made;
  int32_t* order;  // flags of the plan, the cost of each tile by order index, the expected start of
                   // each work tile of an L2 group by each table, in ticks
  int2* contributions_of_block;  // how many there are, and a number that grows with the time at
                                 // which the last one is expected
  int32_t first_writer;  // as in BwdKernelParams: semaphore targets are counted and not given out
  int32_t wave, heads_per_split, num_tiles;
  int32_t heads_per_l2_group;   // kv heads
  int32_t work_tiles_per_tile;  // in an L2 group; of a tile that is split, if some are
  int32_t target_tables;        // of the first L2 group, and of the others
  int32_t num_ctas;             // CTAs of the main kernel, as far as they are counted
  const int32_t* work_list;     // as in BwdKernelParams
  int32_t prepare_groups;       // groups of warps that prepare rows
  int32_t late;  // CTAs that do so while the main kernel begins, so that as many of that begin late
  BwdCompletion completion;
  int32_t heads_kv;
  int32_t grads_are_float, accumulate;
  float grad_scale;
  // In deterministic order: tiles whose work tiles are split, in how many parts, 1 if none, and
  // what a block of one takes, in ticks.
  int32_t split_begin, split_end, splits_per_split_tile, split_ticks;
  // In deterministic order, or where the first writer stores: whether one contribution only of a
  // block writes its dq; of which blocks, as in BwdKernelParams; and how many are left to the last
  // kernel, and behind that which.
  int32_t stores_direct;
  int32_t *direct_dq_store, *summed;
  RankBarrier barrier;  // of the last kernel, with other tiles
  // P has the factor of dropout in its exponent, so dP and delta go without it; 0 and 1 for none.
  float dropout_log2_scale, dropout_inverse_scale;
};

// The kernel that does so for split work tiles; both gradients are (total_k, heads_kv, head dim).
struct BwdCombinePartialsParams {
  const int32_t *plan, *work_list;
  BwdCombineParams combine;
  int32_t total_q, total_k, first, heads_kv, head_dim,
      head_dim_v;            // `first`: number of the work tile of partial 0, if not listed
  int32_t is_deterministic;  // work tiles are in the order of the tiles
  int32_t num_tiles, heads_per_l2_group, head_units;  // see work_tile_coords
  RemoteKeys remote;
};

}  // namespace magi
