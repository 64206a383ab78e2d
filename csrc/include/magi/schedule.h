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

/* What a schedule depends on besides the plan. */
typedef struct {
  int32_t kind;             /* magi_kind */
  int32_t total_q, total_k; /* of the mask; the plan of a backward is that of the transposed one */
  int32_t local_k;          /* keys that are there when the call begins */
  int32_t heads_q, heads_kv, head_dim, head_dim_v;
  int32_t head_units; /* of a forward: how often each tile is worked on */
  int32_t num_sms;    /* of the device: what is split depends on these, not on what is left free */
  int32_t num_ctas;   /* that the call may use */
  int32_t is_deterministic;
  int32_t is_plain;      /* neither softcap nor dropout */
  int32_t is_remote;     /* keys of other ranks arrive while the kernel runs */
  int32_t has_diagonal;  /* a slice of the mask is not FULL */
  int32_t is_all_causal; /* all its slices are CAUSAL */
  int32_t takes_list;    /* the library takes a work list for this call */
  int32_t tail_work_tiles,
      tail_parts;           /* of the last wave, split into so many parts of their heads */
  int32_t keeps_plan_order; /* work tiles never go in waves, whatever is faster */
  int64_t area;             /* pairs of the mask */
} magi_schedule_problem;

/* What is chosen. */
typedef struct {
  int32_t block_m;         /* queries of an m-block */
  int32_t num_head_splits; /* parts of the heads of all tiles; 0: as few as the library chooses */
  int32_t first_writer;    /* the first writer to a block of dq stores */
  int32_t by_document;     /* work tiles go one document after the other */
  int32_t split_begin, split_end; /* tiles, in the order of the plan, that are split */
  int32_t num_splits;             /* into so many parts; 0: none */
  int32_t min_blocks;             /* of a forward: key blocks that a part has at least */
  int32_t direct_dq_store; /* the main kernel writes dq of blocks with a single contribution */
  int32_t reserved;
} magi_schedule_choice;

/* How many of so many CTAs go on preparing rows while the others begin with the main kernel. */
static inline int32_t magi_late_ctas(int32_t num_ctas) { return num_ctas < 8 ? 1 : num_ctas / 8; }

/* The schedule of a plan in host memory: `plan_words` words, a tile plan and what lies behind it.
 *
 * A choice whose block_m is 0 is made first; an outline of the plan, whose records have only the
 * first four words, is enough for that. With `words`, room for `room` words, the plan is copied
 * there with its schedule behind it: with takes_list a magi_work_list in m-blocks of block_m, else
 * the work tiles of m-blocks of 80, and by document its tiles are in that order, too, for kernels
 * that sum dq in order. `there_at`, a number for each tile or NULL, says in which order the keys of
 * tiles arrive. *words_needed is set then; MAGI_CAPACITY if `room` is less. A forward has splits
 * only. */
MAGI_EXPORT magi_status magi_schedule(const int32_t* plan, int64_t plan_words,
                                      const magi_schedule_problem* problem,
                                      magi_schedule_choice* choice, const double* there_at,
                                      int32_t* words, int64_t room, int64_t* words_needed);
/* Room that is enough for the words of a schedule; -1 for bad arguments. */
MAGI_EXPORT int64_t magi_schedule_room(const int32_t* plan, int64_t plan_words,
                                       const magi_schedule_problem* problem);

/* Checks the schedule that `words` has behind its plan, for heads_kv kv heads and m-blocks of
 * block_m: orders have each tile once; each tile, kv head, query head and m-block that a tile
 * visits is in one work tile; partials are those of one tile and kv head each. `list_at`: where a
 * magi_work_list begins, of which all that kernels count by is checked, too; 0: there are work
 * tiles up to the last word. On a fault returns MAGI_INVALID_ARGUMENT and says which. */
MAGI_EXPORT magi_status magi_schedule_check(const int32_t* words, int64_t num_words,
                                            int64_t list_at, int32_t heads_kv, int32_t block_m);

/* Work tiles in the order in which they are taken. Each takes steps, which step_begin says; a step
 * waits until its counter has its target, and counts. */
typedef struct {
  int64_t num_work_tiles, num_counters;
  const int64_t* step_begin; /* (num_work_tiles + 1,) */
  const int32_t* counter;    /* of each step */
  const int32_t* target; /* likewise; of a work tile that counts at a counter several times, that
                            of the first */
  int32_t num_ctas;      /* that take work tiles, one at a time */
  int32_t reserved;
} magi_waits;

/* Whether no work tile waits for ever, and counters count in one order, whichever CTAs are slow. A
 * step that may go on may still do so after any other, so one run shows it for all. On a fault
 * returns MAGI_INVALID_ARGUMENT and says which. */
MAGI_EXPORT magi_status magi_waits_check(const magi_waits* waits);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_SCHEDULE_H */
