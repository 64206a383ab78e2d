// SPDX-License-Identifier: Apache-2.0
// The verbs of an exchange over nodes by NCCL's device API: GPU-initiated networking (GIN) between
// nodes, loads and stores to memory of GPUs inside a node. No GPU has run this.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "device/system_words.cuh"
#include "magi/comm.h"

namespace magi {
namespace comm {

// In device memory, at magi_comm_epoch.network.
struct GinNetwork {
  ncclDevComm comm;
  ncclWindow_t arena;
};

class Network {
 public:
  __device__ __forceinline__ explicit Network(const magi_comm_epoch& e)
      : network_(*static_cast<const GinNetwork*>(e.network)),
        gin_(network_.comm, static_cast<int>(blockIdx.x % network_.comm.ginContextCount)) {}

  __device__ __forceinline__ char* near(int64_t target, int peer) const {
    if (!is_near(peer)) return nullptr;
    return static_cast<char*>(
        ncclGetPeerPointer(network_.arena, static_cast<size_t>(target), peer));
  }

  __device__ __forceinline__ void put(int64_t target, int64_t source, int64_t bytes, int64_t word,
                                      int peer) const {
    gin_.put(world(), peer, network_.arena, static_cast<size_t>(target), network_.arena,
             static_cast<size_t>(source), static_cast<size_t>(bytes), one(word), ncclGin_None{},
             ncclCoopCta{});
  }

  __device__ __forceinline__ void add(int64_t word, int peer) const {
    if (char* there = near(word, peer))
      add_release_system(there, 1);
    else
      gin_.signal(world(), peer, one(word));
  }

  __device__ __forceinline__ uint64_t read(int64_t word) const {
    return gin_.readSignal(network_.arena, static_cast<size_t>(word));
  }

  __device__ __forceinline__ void drain() const { gin_.flush(ncclCoopCta{}); }

 private:
  // Only its own put has to be there when a signal counts it: the protocol waits for all of them.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
  using Add = ncclGin_WeakVASignalAdd;
#else
  using Add = ncclGin_VASignalAdd;
#endif
  __device__ __forceinline__ Add one(int64_t word) const {
    return Add{network_.arena, static_cast<size_t>(word), 1};
  }
  __device__ __forceinline__ ncclTeam world() const { return ncclTeamWorld(network_.comm); }
  __device__ __forceinline__ bool is_near(int peer) const {
    return ncclTeamRankIsMember(ncclTeamLsa(network_.comm), world(), peer);
  }

  const GinNetwork& network_;
  ncclGin gin_;
};

}  // namespace comm
}  // namespace magi
