// SPDX-License-Identifier: Apache-2.0
// Joining, symmetric memory, put with signal, leaving.
#include <cstring>

#include "comm/exchange/verbs.cuh"

namespace magi {
namespace comm {

constexpr int kPutThreads = 256;

__global__ void put_signal(void* target, const void* source, size_t bytes, uint64_t* signal,
                           uint64_t value, int peer) {
  nvshmemx_putmem_signal_block(target, source, bytes, signal, value, NVSHMEM_SIGNAL_SET, peer);
}

__global__ void wait_signal(uint64_t* signal, uint64_t value) {
  nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, value);
}

magi_status done(int error, const char* doing) {
  if (error == 0) return MAGI_OK;
  return fail(MAGI_CUDA_ERROR, "%s: NVSHMEM failed with %d; NVSHMEM_DEBUG=INFO makes it say why.",
              doing, error);
}

magi_status check_joined() {
  if (nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT, "This process has not joined; call magi_comm_join first.");
}

}  // namespace comm
}  // namespace magi

extern "C" {

const char* magi_last_error(void) { return magi::error_buffer(); }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }

void magi_comm_versions(int32_t built[3], int32_t loaded[3]) {
  built[0] = NVSHMEM_VENDOR_MAJOR_VERSION;
  built[1] = NVSHMEM_VENDOR_MINOR_VERSION;
  built[2] = NVSHMEM_VENDOR_PATCH_VERSION;
  nvshmemx_vendor_get_version_info(&loaded[0], &loaded[1], &loaded[2]);
}

int32_t magi_comm_unique_id_bytes(void) { return sizeof(nvshmemx_uniqueid_t); }

magi_status magi_comm_unique_id(void* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  MAGI_RETURN(magi::comm::done(nvshmemx_get_uniqueid(&made), "making an id"));
  memcpy(id, &made, sizeof made);
  return MAGI_OK;
}

magi_status magi_comm_join(const void* id, int32_t rank, int32_t world) {
  if (world < 1 || rank < 0 || rank >= world)
    return magi::fail(MAGI_INVALID_ARGUMENT, "rank %d of %d processes; ranks are 0 to world - 1.",
                      rank, world);
  // NVSHMEM takes the device of the current context. A process that never chose a device may have
  // none, and would join without symmetric memory.
  MAGI_RETURN(magi::cuda_status(cudaFree(nullptr), "making the context of the current device"));
  nvshmemx_uniqueid_t shared;
  memcpy(&shared, id, sizeof shared);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  MAGI_RETURN(magi::comm::done(nvshmemx_set_attr_uniqueid_args(rank, world, &shared, &attributes),
                               "reading the id"));
  return magi::comm::done(nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes), "joining");
}

int32_t magi_comm_has_joined(void) {
  return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED;
}

magi_status magi_comm_check(int32_t version) {
  MAGI_RETURN(magi::comm::check_joined());
  if (version == MAGI_COMM_VERSION) return MAGI_OK;
  return magi::fail(MAGI_INVALID_ARGUMENT, "version %d of the exchange, this library has %d.",
                    version, MAGI_COMM_VERSION);
}

magi_status magi_comm_leave(void) {
  MAGI_RETURN(magi::comm::check_joined());
  nvshmem_finalize();
  return MAGI_OK;
}

magi_status magi_comm_alloc(int64_t bytes, void** address) {
  MAGI_RETURN(magi::comm::check_joined());
  if (bytes < 1)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%lld bytes; ask for 1 or more.",
                      static_cast<long long>(bytes));
  *address = nvshmem_calloc(1, static_cast<size_t>(bytes));
  if (*address == nullptr)
    return magi::fail(MAGI_CAPACITY,
                      "%lld bytes do not fit into symmetric memory; set NVSHMEM_SYMMETRIC_SIZE.",
                      static_cast<long long>(bytes));
  return MAGI_OK;
}

magi_status magi_comm_free(void* address) {
  MAGI_RETURN(magi::comm::check_joined());
  nvshmem_free(address);
  return MAGI_OK;
}

magi_status magi_comm_put_signal(void* target, const void* source, int64_t bytes, uint64_t* signal,
                                 uint64_t value, int32_t peer, void* stream) {
  MAGI_RETURN(magi::comm::check_joined());
  if (bytes < 0 || peer < 0 || peer >= nvshmem_n_pes())
    return magi::fail(MAGI_INVALID_ARGUMENT, "%lld bytes to rank %d of %d.",
                      static_cast<long long>(bytes), peer, nvshmem_n_pes());
  magi::comm::put_signal<<<1, magi::comm::kPutThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      target, source, static_cast<size_t>(bytes), signal, value, peer);
  return magi::cuda_status(cudaGetLastError(), "launching a put");
}

magi_status magi_comm_wait_signal(uint64_t* signal, uint64_t value, void* stream) {
  MAGI_RETURN(magi::comm::check_joined());
  magi::comm::wait_signal<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(signal, value);
  return magi::cuda_status(cudaGetLastError(), "launching a wait");
}

}  // extern "C"
