/* SPDX-License-Identifier: Apache-2.0
 *
 * The schedule of a backward: its work tiles in the order in which CTAs take them up. The host
 * makes it (csrc/planner/schedule), the kernels read it. int32 words, in the buffer of a tile plan
 * or behind one. docs/design/schedule.md says how it is chosen.
 */
#ifndef MAGI_SCHEDULE_H
#define MAGI_SCHEDULE_H

#include <stdint.h>

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tile of 128 keys of one kv head, for some of its query heads and some of the blocks of block_m
 * queries that see it. */
typedef struct {
  int32_t tile, head_kv;
  int32_t split, num_splits; /* part `split` of num_splits equal parts of the query heads */
  int32_t m_begin, m_end;    /* blocks from m_begin to before m_end */
  int32_t num_descending;    /* blocks of each segment that are taken from its end, descending,
                                before the others; MAGI_TRAVERSAL_WRAP: as many as there are before
                                the segment */
  int32_t partial; /* where dk and dv wait to be combined; -1: this is all of the tile and head */
} magi_work_tile;
#define MAGI_TRAVERSAL_BITS 12
#define MAGI_TRAVERSAL_WRAP ((1 << MAGI_TRAVERSAL_BITS) - 1)

/* A work list: this header, then arrays at offsets in words from its start. The kernel before the
 * main one prepares rows in the order of `blocks`, and the one behind it takes up `entries` in
 * order, each when all work tiles that add to it are through. Parts of the query heads of a kv head
 * are MAGI_LIST_SPLITS, also where a tile is whole. */
typedef struct {
  int32_t num_work_tiles, num_partials, num_entries;
  int32_t num_blocks_at_once; /* that the first work tiles begin with */
  int32_t tile_words;         /* ceil(num_tiles / 32) */
  int32_t words_work_tiles;   /* num_work_tiles of magi_work_tile */
  int32_t words_partials;     /* num_partials of magi_partial */
  int32_t words_left;   /* (num_tiles, heads_kv, MAGI_LIST_SPLITS): work tiles that a part has */
  int32_t words_blocks; /* (num_m_blocks,): the order in which they are first needed */
  int32_t
      words_tiles_of_block; /* (num_m_blocks, tile_words): a bit for each tile that adds to it */
  int32_t words_entries;    /* num_entries of magi_list_entry */
  int32_t words_total;
  int32_t reserved[4];
} magi_work_list;
#define MAGI_LIST_SPLITS 4

typedef struct {
  int32_t tile, head_kv, num_splits, reserved;
} magi_partial;

typedef struct {
  int32_t block; /* of queries, whose dq is to be rounded; ~partial: one that is to be combined */
  int32_t part;  /* head_kv * MAGI_LIST_SPLITS + part of its query heads; of a partial, which of
                    MAGI_LIST_SPLITS shares of its rows */
} magi_list_entry;

/* What a work list depends on besides the plan. */
typedef struct {
  int32_t heads_kv;
  int32_t group;    /* query heads of a kv head, a multiple of MAGI_LIST_SPLITS */
  int32_t num_sms;  /* of the device: what is split depends on these, not on what is left free */
  int32_t num_ctas; /* that the call may use */
  int32_t block_m;
} magi_schedule_shape;

/* How many of so many CTAs go on preparing rows while the others begin with the main kernel. */
static inline int32_t magi_late_ctas(int32_t num_ctas) { return num_ctas < 8 ? 1 : num_ctas / 8; }

/* The work list of a transposed plan in host memory. *words_needed is set in any case;
 * MAGI_CAPACITY if list_words is less. */
MAGI_EXPORT magi_status magi_bwd_work_list(const int32_t* plan, const magi_schedule_shape* shape,
                                           int32_t* list, int64_t list_words,
                                           int64_t* words_needed);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_SCHEDULE_H */
