// SPDX-License-Identifier: Apache-2.0
// A device communicator of NCCL and the memory of an exchange in it, see magi/gin.h.
#include <memory>

#include "comm/exchange/verbs.cuh"
#include "magi/gin.h"

namespace magi {
namespace comm {

struct Group {
  ncclComm_t comm;
  ncclDevComm device;
  void* memory = nullptr;
  ncclWindow_t window;
  void* network = nullptr;
};

magi_status done(ncclResult_t result, const char* doing) {
  if (result == ncclSuccess) return MAGI_OK;
  return fail(MAGI_CUDA_ERROR, "%s: NCCL failed with %s; NCCL_DEBUG=INFO makes it say why.", doing,
              ncclGetErrorString(result));
}

void split_version(int code, int32_t version[3]) {
  version[0] = code / 10000;
  version[1] = code / 100 % 100;
  version[2] = code % 100;
}

magi_status check_device_api(ncclComm_t comm) {
  ncclCommProperties_t found = NCCL_COMM_PROPERTIES_INITIALIZER;
  MAGI_RETURN(done(ncclCommQueryProperties(comm, &found), "asking for the device API"));
  if (!found.deviceApiSupport)
    return fail(MAGI_UNSUPPORTED, "NCCL has no device API for these GPUs and this driver.");
  if (found.ginType == NCCL_GIN_TYPE_NONE)
    return fail(MAGI_UNSUPPORTED,
                "NCCL has no GPU-initiated networking here; it needs a network "
                "card of the ConnectX-4 line or later, or EFA.");
  return MAGI_OK;
}

// In device memory, where the kernels read it.
magi_status make_network(Group& group) {
  const GinNetwork network{group.device, group.window};
  MAGI_RETURN(cuda_status(cudaMalloc(&group.network, sizeof network), "room for the communicator"));
  return cuda_status(cudaMemcpy(group.network, &network, sizeof network, cudaMemcpyHostToDevice),
                     "copying the communicator");
}

}  // namespace comm
}  // namespace magi

extern "C" {

const char* magi_last_error(void) { return magi::error_buffer(); }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }

void magi_gin_versions(int32_t built[3], int32_t loaded[3]) {
  int code = 0;
  ncclGetVersion(&code);
  magi::comm::split_version(NCCL_VERSION_CODE, built);
  magi::comm::split_version(code, loaded);
}

magi_status magi_gin_join(void* nccl_comm, void** group) {
  auto made = std::make_unique<magi::comm::Group>();
  made->comm = static_cast<ncclComm_t>(nccl_comm);
  MAGI_RETURN(magi::comm::check_device_api(made->comm));
  ncclDevCommRequirements_t needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginForceEnable = true;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  MAGI_RETURN(magi::comm::done(ncclDevCommCreate(made->comm, &needs, &made->device), "joining"));
  *group = made.release();
  return MAGI_OK;
}

magi_status magi_gin_leave(void* group) {
  std::unique_ptr<magi::comm::Group> left(static_cast<magi::comm::Group*>(group));
  return magi::comm::done(ncclDevCommDestroy(left->comm, &left->device), "leaving");
}

magi_status magi_gin_alloc(void* group, int64_t bytes, void** address, void** network) {
  auto& owner = *static_cast<magi::comm::Group*>(group);
  if (bytes < 1 || owner.memory != nullptr)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%lld bytes while %s is out; ask for 1 or more, once.",
                      static_cast<long long>(bytes), owner.memory ? "memory" : "none");
  const auto size = static_cast<size_t>(bytes);
  MAGI_RETURN(magi::comm::done(ncclMemAlloc(&owner.memory, size), "allocating"));
  MAGI_RETURN(magi::cuda_status(cudaMemset(owner.memory, 0, size), "clearing memory"));
  MAGI_RETURN(magi::cuda_status(cudaDeviceSynchronize(), "clearing memory"));
  MAGI_RETURN(magi::comm::done(ncclCommWindowRegister(owner.comm, owner.memory, size, &owner.window,
                                                      NCCL_WIN_COLL_SYMMETRIC),
                               "sharing memory"));
  MAGI_RETURN(magi::comm::make_network(owner));
  *address = owner.memory;
  *network = owner.network;
  return MAGI_OK;
}

magi_status magi_gin_free(void* group) {
  auto& owner = *static_cast<magi::comm::Group*>(group);
  MAGI_RETURN(magi::cuda_status(cudaFree(owner.network), "giving the communicator's room back"));
  MAGI_RETURN(
      magi::comm::done(ncclCommWindowDeregister(owner.comm, owner.window), "parting memory"));
  MAGI_RETURN(magi::comm::done(ncclMemFree(owner.memory), "giving memory back"));
  owner.network = owner.memory = nullptr;
  return MAGI_OK;
}

magi_status magi_comm_check(int32_t version) {
  if (version == MAGI_COMM_VERSION) return MAGI_OK;
  return magi::fail(MAGI_INVALID_ARGUMENT, "version %d of the exchange, this library has %d.",
                    version, MAGI_COMM_VERSION);
}

}  // extern "C"
