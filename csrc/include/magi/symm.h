/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of exchanges within one NVLink domain. Every rank has a buffer: memory that all ranks
 * can address, at the same layout everywhere. Ranks write rows straight into each other's buffers;
 * a word per sender says when its rows are all there.
 *
 * A buffer begins with control words of 32 bits, one in each 32 bytes. The caller zeroes them once
 * on all ranks before any epoch; their offsets are macros below:
 * - MAGI_SYMM_EPOCH: epochs of this buffer that are over.
 * - MAGI_SYMM_PUT_DONE: epochs for which this rank's own rows have left.
 * - MAGI_SYMM_REDUCE_CTAS: CTAs of magi_symm_reduce that are done; 0 between epochs.
 * - MAGI_SYMM_CREDIT: written by rank r. Epochs of r's buffer up to this one are over, so it may be
 *   written again.
 * - MAGI_SYMM_SIGNAL: belongs to one sender. Its rows of epoch n are here when this is >= n
 *   (mod 2^32).
 * - MAGI_SYMM_SENT: transfers of this rank's own signal that are done; 0 between epochs.
 * - MAGI_SYMM_UNPACK_CTAS: CTAs of magi_symm_unpack and magi_symm_recv_reduce that are done; 0
 *   between epochs.
 * - MAGI_SYMM_NEXT_TRANSFER: transfers that CTAs have asked for beyond their first; 0 between
 *   epochs.
 *
 * Data follows at magi_symm_control_bytes(world). Counters live in memory, not in arguments, so
 * launches may be captured in a graph and replayed. Every rank makes the same sequence of epochs.
 *
 * A wait that lasts longer than timeout_ms stores 1 + the rank waited for into *failed_peer, if
 * that is 0, and goes on; so does every wait of a millisecond while *failed_peer is not 0. An
 * attention kernel that waits for a signal of the buffer stores 1 + MAGI_SYMM_FAILED_SIGNAL +
 * signal. *failed_peer is in host memory that the GPU can write; results are then void.
 */
#ifndef MAGI_SYMM_H
#define MAGI_SYMM_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MAGI_SYMM_WORD_BYTES 32
#define MAGI_SYMM_TENSORS 3
#define MAGI_SYMM_SIGNALS_PER_RANK 32 /* signals of one sender in one buffer, at most */

#define MAGI_SYMM_FAILED_SIGNAL 65536

/* Offsets in units of MAGI_SYMM_WORD_BYTES. */
#define MAGI_SYMM_EPOCH 0
#define MAGI_SYMM_PUT_DONE 1
#define MAGI_SYMM_REDUCE_CTAS 2
#define MAGI_SYMM_CREDIT(world, rank) (3 + (rank))
#define MAGI_SYMM_SIGNAL(world, signal) (3 + (world) + (signal))
#define MAGI_SYMM_SENT(world, signal) \
  (3 + (world) + MAGI_SYMM_SIGNALS_PER_RANK * (world) + (signal))
#define MAGI_SYMM_UNPACK_CTAS(world) (3 + (world) + 2 * MAGI_SYMM_SIGNALS_PER_RANK * (world))
#define MAGI_SYMM_NEXT_TRANSFER(world) (4 + (world) + 2 * MAGI_SYMM_SIGNALS_PER_RANK * (world))

MAGI_EXPORT int64_t magi_symm_control_bytes(int32_t world);

/* Rows of up to three tensors to their src_rows in the buffers of other ranks, by few CTAs that are
 * all at work before the next kernel of the stream starts, if that allows it (programmatic
 * dependent launch). */
typedef struct {
  int32_t version; /* MAGI_ABI_VERSION */
  int32_t rank, world;
  int32_t num_tensors; /* 1..MAGI_SYMM_TENSORS */
  int32_t num_transfers;
  int32_t num_ctas;
  uint32_t timeout_ms; /* below 2^31 */
  int32_t reserved;
  magi_symm_buffer buffer;
  magi_symm_buffer also_free; /* own may be NULL; else its epochs too must be over everywhere before
                                 the next kernel starts */
  const int32_t* transfers;   /* device: (num_transfers, 4): own signal, first row here (-1: zeros),
                              first row there, rows; in the order of sending. Where the signal changes
                              a CTA waits for transfers of less than three chunks */
  const int32_t*
      signals; /* device: (.., 4) of own signals: rank, signal in its buffer, transfers, 0 */
  int64_t source_stride[MAGI_SYMM_TENSORS]; /* bytes from row to row, a multiple of 16 */
  int64_t data_at[MAGI_SYMM_TENSORS];       /* byte offset of row 0 in a buffer, a multiple of 16 */
  int64_t row_bytes[MAGI_SYMM_TENSORS];     /* multiples of 16 */
  int32_t* failed_peer;
  const void* source[MAGI_SYMM_TENSORS];
  void* stream;
} magi_symm_put_params;
MAGI_EXPORT magi_status magi_symm_put(const magi_symm_put_params* params);

/* Attention beside such a put of its k and v, which is launched right before it on the same stream:
 * it starts when all CTAs of the put are at work. What `put` says of source and stream is not
 * looked at. Without a put, `put` is NULL. The forward ends this epoch of remote->buffer, unless
 * its of_rank is NULL: when this rank's rows have left and nothing of the buffer will be read any
 * more, the others are told that it is free. `event`: a cudaEvent_t to be recorded behind all, or
 * NULL. */
MAGI_EXPORT magi_status magi_ffa_fwd_remote(const magi_ffa_fwd_params* params,
                                            const magi_ffa_remote* remote,
                                            const magi_symm_put_params* put, void* event);
/* Gradients are of 16 bits, dk and dv (local_keys, heads_kv, d), and not accumulated. Epochs of
 * buffers are ended by magi_symm_reduce. */
MAGI_EXPORT magi_status magi_ffa_bwd_remote(const magi_ffa_bwd_params* params,
                                            const magi_ffa_remote* remote,
                                            const magi_symm_put_params* put);

/* Copies rows that other ranks put out of this rank's buffer as they arrive, then ends the epoch.
 * Put into the stream right behind the put of this epoch, beside which it starts. Here signal s
 * belongs to rank s / MAGI_SYMM_SIGNALS_PER_RANK. */
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t num_tensors; /* 1..MAGI_SYMM_TENSORS */
  int32_t num_transfers;
  int32_t num_ctas;
  uint32_t timeout_ms;
  int32_t reserved;
  magi_symm_buffer buffer;
  const int32_t* transfers; /* device: (num_transfers, 4), in the order of arrival: signal, first
                            row in the buffer, first row of the result, rows */
  int64_t data_at[MAGI_SYMM_TENSORS];    /* byte offset of row 0 in the buffer, a multiple of 16 */
  int64_t row_bytes[MAGI_SYMM_TENSORS];  /* multiples of 16 */
  int64_t out_stride[MAGI_SYMM_TENSORS]; /* bytes from row to row of the result, a multiple of 16 */
  int32_t* failed_peer;
  void* out[MAGI_SYMM_TENSORS];
  void* stream;
} magi_symm_unpack_params;
MAGI_EXPORT magi_status magi_symm_unpack(const magi_symm_unpack_params* params);

/* Adds rows that other ranks put into this rank's buffer, as they arrive: out = base + the rows of
 * ranks 0, 1, ..., in this order, in float32; then ends the epoch. Put into the stream right behind
 * the put of this epoch, beside which it starts. Here signal s belongs to rank s /
 * MAGI_SYMM_SIGNALS_PER_RANK. What this rank adds itself is read where it lies. */
#define MAGI_SYMM_REDUCE_ROWS 16
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t rows;        /* of the result */
  int32_t num_tensors; /* 1..MAGI_SYMM_TENSORS */
  int32_t num_ctas;
  int32_t wire_dtype; /* of the rows in the buffer, and of this rank's own */
  int32_t base_dtype; /* of base */
  int32_t out_dtype;
  int32_t row_values[MAGI_SYMM_TENSORS]; /* multiples of 8 */
  uint32_t timeout_ms;
  int32_t reserved;
  magi_symm_buffer buffer;
  const int32_t* src_rows; /* device: (world, rows): row in the buffer of what that rank adds to a
                              row, of this rank its own row; -1: nothing */
  const int32_t* needed_signals; /* device: (rows / MAGI_SYMM_REDUCE_ROWS rounded up, world): which
                           signals of that rank so many rows of the result wait for, a bit each */
  const int32_t* signals;        /* device: (world,) all of them */
  int64_t data_at[MAGI_SYMM_TENSORS];
  int64_t own_stride[MAGI_SYMM_TENSORS]; /* bytes from row to row of this rank's own, a multiple of
                                            16 */
  int32_t* failed_peer;
  const void* own[MAGI_SYMM_TENSORS];
  const void* base[MAGI_SYMM_TENSORS]; /* (rows, row_values) contiguous, or NULL for 0 */
  void* out[MAGI_SYMM_TENSORS];        /* (rows, row_values) contiguous; may be base */
  void* stream;
} magi_symm_recv_reduce_params;
MAGI_EXPORT magi_status magi_symm_recv_reduce(const magi_symm_recv_reduce_params* params);

/* Adds rows that other ranks wrote into this rank's buffer: out = base + the rows of ranks 0, 1,
 * ..., in this order, in float32, in tiles of 128 rows which may be any of out. Put into the stream
 * behind magi_ffa_bwd_remote, which waits until they are there. Ends the epoch of the buffer and,
 * if `put_buffer.own` is given, that of a buffer of magi_symm_put. */
typedef struct {
  int32_t version;
  int32_t rank, world;
  int32_t rows;        /* of base, a multiple of 128 */
  int32_t num_tensors; /* 1..MAGI_SYMM_TENSORS */
  int32_t wire_dtype;  /* of the rows in the buffer */
  int32_t base_dtype;  /* of base */
  int32_t out_dtype;
  int32_t row_values[MAGI_SYMM_TENSORS]; /* multiples of 8 */
  uint32_t timeout_ms;
  int32_t out_rows; /* those of the last tile from here on do not exist */
  int32_t reserved;
  magi_symm_buffer buffer, put_buffer;
  const int32_t* tiles;    /* device: (rows / 128,) which tile of out each is */
  const int32_t* src_rows; /* device: (world, rows): row in the buffer of what that rank adds to a
                              row, -1: nothing */
  int64_t data_at[MAGI_SYMM_TENSORS];
  int32_t* failed_peer;
  const void* base[MAGI_SYMM_TENSORS]; /* (rows, row_values) contiguous, or NULL for 0 */
  void* out[MAGI_SYMM_TENSORS];        /* (out_rows, row_values) contiguous */
  void* event;                         /* as of magi_ffa_fwd_remote */
  void* stream;
} magi_symm_reduce_params;
MAGI_EXPORT magi_status magi_symm_reduce(const magi_symm_reduce_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_SYMM_H */
