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

#ifdef __cplusplus
}
#endif

#endif /* MAGI_COMM_H */
