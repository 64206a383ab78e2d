/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of exchanges within one NVLink domain. Every rank has a box: memory that all ranks can address, at the same layout
 * everywhere. Ranks write rows straight into each other's boxes; a word per sender says when its rows are all there.
 *
 * A box begins with control words of 32 bits, one in each 32 bytes, zeroed once by the caller on all ranks before any use:
 *   arrived[i]  of slot i, which belongs to one sender: its rows of use n are here when this is >= n (mod 2^32)
 *   free[r]     written by rank r: of its box, uses up to this one are over, so it may be written again
 *   uses        uses of this box that are over
 *   pushed      uses for which this rank's own rows have left
 *   left[i]     pieces of this rank's own slot i that are done; 0 between uses
 *   ctas        CTAs that are done; 0 between uses
 *   taken       the same of magi_box_take and magi_box_add
 *   next        pieces that CTAs have asked for beyond their first; 0 between uses
 * Data follows at magi_box_control_bytes(world). Counters live in memory, not in arguments, so launches may be captured in a
 * graph and replayed. Every rank makes the same sequence of uses.
 *
 * A wait that lasts longer than timeout_ms stores 1 + the rank waited for into *failure, if that is 0, and goes on; so does
 * every wait of a millisecond while *failure is not 0. An attention kernel that waits for a slot of the box stores
 * 1 + MAGI_BOX_SLOT_CULPRIT + slot. *failure is in host memory that the GPU can write; results are then void.
 */
#ifndef MAGI_BOX_H
#define MAGI_BOX_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MAGI_BOX_WORD_BYTES 32
#define MAGI_BOX_TENSORS 3
#define MAGI_BOX_GROUPS 32 /* slots of one sender in one box, at most */

#define MAGI_BOX_SLOT_CULPRIT 65536

/* Offsets in units of MAGI_BOX_WORD_BYTES. */
#define MAGI_BOX_USES 0
#define MAGI_BOX_PUSHED 1
#define MAGI_BOX_CTAS 2
#define MAGI_BOX_FREE(world, rank) (3 + (rank))
#define MAGI_BOX_ARRIVED(world, slot) (3 + (world) + (slot))
#define MAGI_BOX_LEFT(world, slot) (3 + (world) + MAGI_BOX_GROUPS * (world) + (slot))
#define MAGI_BOX_TAKEN(world) (3 + (world) + 2 * MAGI_BOX_GROUPS * (world))
#define MAGI_BOX_NEXT(world) (4 + (world) + 2 * MAGI_BOX_GROUPS * (world))

MAGI_EXPORT int64_t magi_box_control_bytes(int32_t world);

/* Rows of up to three tensors to their places in the boxes of other ranks, by few CTAs that are all at work before the next
 * kernel of the stream starts, if that allows it (programmatic dependent launch). */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t rank, world;
  int32_t num_tensors; /* 1..MAGI_BOX_TENSORS */
  int32_t num_pieces;
  int32_t num_ctas;
  uint32_t timeout_ms; /* below 2^31 */
  int32_t reserved;
  magi_box box;
  magi_box also_free;    /* own may be NULL; else its uses too must be over everywhere before the next kernel starts */
  const int32_t* pieces; /* device: (num_pieces, 4): own slot, first row here (-1: zeros), first row there, rows; in the
                            order of sending. Where the slot changes a CTA waits for pieces of less than three chunks */
  const int32_t* slots;  /* device: (.., 4) of own slots: rank, slot in its box, pieces, 0 */
  int64_t source_stride[MAGI_BOX_TENSORS]; /* bytes from row to row, a multiple of 16 */
  int64_t data_at[MAGI_BOX_TENSORS];       /* byte offset of row 0 in a box, a multiple of 16 */
  int64_t row_bytes[MAGI_BOX_TENSORS];     /* multiples of 16 */
  int32_t* failure;
  const void* source[MAGI_BOX_TENSORS];
  void* stream;
} magi_box_push_params;
MAGI_EXPORT magi_status magi_box_push(const magi_box_push_params* params);

/* Attention beside such a push of its k and v, which is launched right before it on the same stream: it starts when all CTAs of the push
 * are at work. What `push` says of source and stream is not looked at. Without a push, `push` is NULL.
 * The forward ends this use of remote->box, unless its of_rank is NULL: when this rank's rows have left and nothing of the box will be
 * read any more, the others are told that it is free. `event`: a cudaEvent_t to be recorded behind all, or NULL. */
MAGI_EXPORT magi_status magi_ffa_fwd_remote(const magi_ffa_fwd_params* params, const magi_ffa_remote* remote,
                                            const magi_box_push_params* push, void* event);
/* Gradients are of 16 bits, dk and dv (local_keys, heads_kv, d), and not accumulated. Uses of boxes are ended by magi_box_reduce. */
MAGI_EXPORT magi_status magi_ffa_bwd_remote(const magi_ffa_bwd_params* params, const magi_ffa_remote* remote,
                                            const magi_box_push_params* push);

/* Copies rows that other ranks push out of this rank's box as they arrive, then ends the use. Put into the stream right behind
 * the push of this use, beside which it starts. Here slot s belongs to rank s / MAGI_BOX_GROUPS. */
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t num_tensors; /* 1..MAGI_BOX_TENSORS */
  int32_t num_pieces;
  int32_t num_ctas;
  uint32_t timeout_ms;
  int32_t reserved;
  magi_box box;
  const int32_t* pieces; /* device: (num_pieces, 4), in the order of arrival: slot, first row in the box, first row of the
                            result, rows */
  int64_t data_at[MAGI_BOX_TENSORS];    /* byte offset of row 0 in the box, a multiple of 16 */
  int64_t row_bytes[MAGI_BOX_TENSORS];  /* multiples of 16 */
  int64_t out_stride[MAGI_BOX_TENSORS]; /* bytes from row to row of the result, a multiple of 16 */
  int32_t* failure;
  void* out[MAGI_BOX_TENSORS];
  void* stream;
} magi_box_take_params;
MAGI_EXPORT magi_status magi_box_take(const magi_box_take_params* params);

/* Adds rows that other ranks push into this rank's box, as they arrive: out = base + the rows of ranks 0, 1, ..., in this order, in
 * float32; then ends the use. Put into the stream right behind the push of this use, beside which it starts. Here slot s belongs to
 * rank s / MAGI_BOX_GROUPS. What this rank adds itself is read where it lies. */
#define MAGI_BOX_ADD_ROWS 16
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t rows;        /* of the result */
  int32_t num_tensors; /* 1..MAGI_BOX_TENSORS */
  int32_t num_ctas;
  int32_t wire_dtype;  /* of the rows in the box, and of this rank's own */
  int32_t base_dtype;  /* of base */
  int32_t out_dtype;
  int32_t row_values[MAGI_BOX_TENSORS]; /* multiples of 8 */
  uint32_t timeout_ms;
  int32_t reserved;
  magi_box box;
  const int32_t* places; /* device: (world, rows): row in the box of what that rank adds to a row, of this rank its own row; -1: nothing */
  const int32_t* needs;  /* device: (rows / MAGI_BOX_ADD_ROWS rounded up, world): which slots of that rank so many rows of the result wait
                            for, a bit each */
  const int32_t* slots;  /* device: (world,) all of them */
  int64_t data_at[MAGI_BOX_TENSORS];
  int64_t own_stride[MAGI_BOX_TENSORS]; /* bytes from row to row of this rank's own, a multiple of 16 */
  int32_t* failure;
  const void* own[MAGI_BOX_TENSORS];
  const void* base[MAGI_BOX_TENSORS]; /* (rows, row_values) contiguous, or NULL for 0 */
  void* out[MAGI_BOX_TENSORS];        /* (rows, row_values) contiguous; may be base */
  void* stream;
} magi_box_add_params;
MAGI_EXPORT magi_status magi_box_add(const magi_box_add_params* params);

/* Adds rows that other ranks wrote into this rank's box: out = base + the rows of ranks 0, 1, ..., in this order, in float32, in tiles
 * of 128 rows which may be any of out.
 * Put into the stream behind magi_ffa_bwd_remote, which waits until they are there. Ends the use of the box and, if `pushed.own` is given,
 * that of a box of magi_box_push. */
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t rows;        /* of base, a multiple of 128 */
  int32_t num_tensors; /* 1..MAGI_BOX_TENSORS */
  int32_t wire_dtype;  /* of the rows in the box */
  int32_t base_dtype;  /* of base */
  int32_t out_dtype;
  int32_t row_values[MAGI_BOX_TENSORS]; /* multiples of 8 */
  uint32_t timeout_ms;
  int32_t out_rows;    /* those of the last tile from here on do not exist */
  int32_t reserved;
  magi_box box, pushed;
  const int32_t* tiles;  /* device: (rows / 128,) which tile of out each is */
  const int32_t* places; /* device: (world, rows): row in the box of what that rank adds to a row, -1: nothing */
  int64_t data_at[MAGI_BOX_TENSORS];
  int32_t* failure;
  const void* base[MAGI_BOX_TENSORS]; /* (rows, row_values) contiguous, or NULL for 0 */
  void* out[MAGI_BOX_TENSORS];        /* (out_rows, row_values) contiguous */
  void* event;                        /* as of magi_ffa_fwd_remote */
  void* stream;
} magi_box_reduce_params;
MAGI_EXPORT magi_status magi_box_reduce(const magi_box_reduce_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_BOX_H */
