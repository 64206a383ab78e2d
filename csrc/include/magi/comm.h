/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of libmagi_comm.so: one-sided transfers over NVSHMEM. Its device half is linked in; the
 * host half, libnvshmem_host.so.3, must be loaded with global symbols before this library is.
 * Statuses and messages as in abi.h.
 */
#ifndef MAGI_COMM_H
#define MAGI_COMM_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NVSHMEM versions as major, minor, patch: what this library was compiled with, and the host half
 * that was loaded. */
MAGI_EXPORT void magi_comm_versions(int32_t built[3], int32_t loaded[3]);

/* One process makes an id; every process joins with it, on its current device. Joining is
 * collective. */
MAGI_EXPORT int32_t magi_comm_unique_id_bytes(void);
MAGI_EXPORT magi_status magi_comm_unique_id(void* id);
MAGI_EXPORT magi_status magi_comm_join(const void* id, int32_t rank, int32_t world);
/* 1 if this process has joined, by this library or another one, and has not left. */
MAGI_EXPORT int32_t magi_comm_has_joined(void);
/* Collective: every process is done with the memory of the others, and gives back its own. */
MAGI_EXPORT magi_status magi_comm_leave(void);

/* Zeroed memory at one offset in every process: collective, with equal bytes everywhere. So is
 * giving it back. */
MAGI_EXPORT magi_status magi_comm_alloc(int64_t bytes, void** address);
MAGI_EXPORT magi_status magi_comm_free(void* address);

/* Copies to the memory of rank `peer`, then sets its signal there to `value`: who sees the value
 * sees the bytes. target and signal are addresses of this process in memory from magi_comm_alloc;
 * so must source be, if the peer is on another node. Runs on the stream; nothing is waited for. */
MAGI_EXPORT magi_status magi_comm_put_signal(void* target, const void* source, int64_t bytes,
                                             uint64_t* signal, uint64_t value, int32_t peer,
                                             void* stream);
/* The stream goes on when the signal of this process is at least `value`. */
MAGI_EXPORT magi_status magi_comm_wait_signal(uint64_t* signal, uint64_t value, void* stream);

/* The layout of the structs below, their `version`. They change more often than those of abi.h. */
#define MAGI_COMM_VERSION 6

/* A group cast over nodes and its reduce, docs/design/two_levels.md. All memory of all exchanges of
 * a group is one piece from magi_comm_alloc, the arena, with the same layout on all ranks; places
 * in it are offsets in bytes. Signals are words of 64 bits that only grow. Each has a total on the
 * rank that waits for it: what the epochs that are over have added to it. The epoch is a word that
 * counts those; credits are awaited at it. So casts of any plans follow one another in one arena,
 * and launches may be captured in a graph. Casts and reduces have an epoch each.
 *
 * A wait that lasts longer than timeout_ms stores 1 + the rank waited for into failed_peer[0], if
 * that is 0, and sets the word at failed_at; other waits end when failed_peer[0] is not 0. Each of
 * them stores 1 into failed_peer[1 + the rank waited for]. From then on this rank sends nothing, no
 * rows, signals or credits, and its results are void. failed_peer is in host memory that the GPU
 * can write. */
typedef struct {
  void* arena;
  int64_t epoch_at;   /* of this rank's epoch */
  int64_t signals_at; /* of signal 0 */
  int64_t totals_at;  /* of its total */
  int64_t failed_at;
  int32_t* failed_peer; /* (1 + world,) */
  const void* network;  /* device: of magi_gin_alloc; null over NVSHMEM */
  uint32_t timeout_ms;  /* below 2^31 */
  int32_t reserved;
} magi_comm_epoch;

/* Rows of a put and of a wait in tables, of int64. */
#define MAGI_COMM_PUT_WORDS \
  8 /* source, target, bytes, rank, signal there, then a wait or -1, 0, 0 */
#define MAGI_COMM_WAIT_WORDS 3 /* signal here, what an epoch adds to it, rank that does */
#define MAGI_COMM_BLOCK_WORDS                                               \
  9 /* first of begins, rows, place of the result if the network takes it;  \
       then a put of it: target, bytes, rank, signal there; first wait, end \
       of waits */

/* Puts in this order, each after its wait, all of them when `credits` say that the epoch before is
 * over on the ranks that they go to. When the kernel is over, their sources may be written again.
 */
typedef struct {
  int32_t version; /* MAGI_COMM_VERSION */
  int32_t num_puts, num_credits, num_ctas;
  magi_comm_epoch epoch;
  const int64_t* puts;    /* device: (num_puts, MAGI_COMM_PUT_WORDS) */
  const int64_t* credits; /* device: (num_credits, MAGI_COMM_WAIT_WORDS) */
  void* stream;
} magi_comm_put_params;
MAGI_EXPORT magi_status magi_comm_put(const magi_comm_put_params* params);

/* The same puts, beside the next kernel of the stream: one of attention, which reads rows of the
 * arena while they arrive. It sees the arena as a magi_symm_buffer of one rank, with control words
 * at control_at. Its signal g says that the rows of group g are here, as the waits begins[g] to
 * begins[g + 1] have counted this epoch. Groups are passed on in order. When all have been, and
 * the puts of this rank have read their sources, the buffer's MAGI_SYMM_PUT_DONE says so. Others
 * end the epochs of the buffer. The memory to be cleared, in multiples of 16 bytes, is zero before
 * any signal. */
#define MAGI_COMM_CONTROL_BYTES 4096 /* of the control words */
typedef struct {
  magi_comm_put_params put;
  int32_t num_groups, reserved;
  int64_t control_at;
  int64_t clear_at[2], clear_bytes[2];
  const int64_t* begins; /* device: (num_groups + 1,) */
  const int64_t* waits;  /* device: (.., MAGI_COMM_WAIT_WORDS) */
} magi_comm_relay_params;
MAGI_EXPORT magi_status magi_comm_relay(const magi_comm_relay_params* params);

/* The stream goes on when all these signals have counted this epoch. */
typedef struct {
  int32_t version;
  int32_t num_waits;
  magi_comm_epoch epoch;
  const int64_t* waits; /* device: (num_waits, MAGI_COMM_WAIT_WORDS) */
  void* stream;
} magi_comm_wait_params;
MAGI_EXPORT magi_status magi_comm_wait(const magi_comm_wait_params* params);

/* Blocks of rows, each after its waits: a row is the sum of terms in their order, in float32,
 * rounded to the dtype of the wire. A block then goes to another rank. Row i of a block has the
 * terms begins[first + i] to begins[first + i + 1], each the place of a row in the arena. */
typedef struct {
  int32_t version;
  int32_t num_blocks, num_ctas;
  int32_t row_values; /* a multiple of 8 */
  int32_t wire_dtype;
  magi_comm_epoch epoch;
  const int64_t* blocks; /* device: (num_blocks, MAGI_COMM_BLOCK_WORDS) */
  const int64_t* waits;  /* device: (.., MAGI_COMM_WAIT_WORDS) */
  const int64_t* begins; /* device */
  const int64_t* terms;  /* device */
  void* stream;
} magi_comm_sum_params;
MAGI_EXPORT magi_status magi_comm_sum(const magi_comm_sum_params* params);

/* Ends the epoch: adds to the totals what it has added to the signals, and tells these ranks that
 * what they write here may be written again. Behind the last read on the stream. */
typedef struct {
  int32_t version;
  int32_t num_ranks, num_counted;
  magi_comm_epoch epoch;
  const int64_t* ranks;   /* device: (num_ranks,) */
  const int64_t* counted; /* device: (num_counted, MAGI_COMM_WAIT_WORDS), each signal once */
  int64_t signal;         /* at each of them */
  void* stream;
} magi_comm_end_params;
MAGI_EXPORT magi_status magi_comm_end(const magi_comm_end_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_COMM_H */
