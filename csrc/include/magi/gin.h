/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of libmagi_gin.so: the exchange of comm.h (magi_comm_put, _relay, _wait, _sum, _end)
 * over NCCL's device API. NCCL itself is not linked in: libnccl.so.2 must be loaded with global
 * symbols before this library is, and be of the minor version that this was compiled with. No GPU
 * has run this.
 */
#ifndef MAGI_GIN_H
#define MAGI_GIN_H

#include "magi/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NCCL versions as major, minor, patch: what this library was compiled with, and what was loaded.
 */
MAGI_EXPORT void magi_gin_versions(int32_t built[3], int32_t loaded[3]);

/* Makes a device communicator of an ncclComm_t whose ranks lie on several nodes. Collective. */
MAGI_EXPORT magi_status magi_gin_join(void* nccl_comm, void** group);
/* Collective, when all memory has been given back. */
MAGI_EXPORT magi_status magi_gin_leave(void* group);

/* Zeroed memory that all ranks of the group may write, one piece at a time, with equal bytes
 * everywhere; and what magi_comm_epoch.network needs to be for it. Collective. So is giving it
 * back.
 */
MAGI_EXPORT magi_status magi_gin_alloc(void* group, int64_t bytes, void** address, void** network);
MAGI_EXPORT magi_status magi_gin_free(void* group);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_GIN_H */
