// SPDX-License-Identifier: Apache-2.0
// The verbs of an exchange over nodes by NVSHMEM.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/system_words.cuh"
#include "magi/comm.h"

namespace magi {
namespace comm {

class Network {
 public:
  __device__ __forceinline__ explicit Network(const magi_comm_epoch& e)
      : arena_(static_cast<char*>(e.arena)) {}

  // A place of another rank's arena, where loads and stores reach it; null if they do not. Places
  // count from the arena's begin.
  __device__ __forceinline__ char* near(int64_t target, int peer) const {
    return static_cast<char*>(nvshmem_ptr(arena_ + target, peer));
  }

  // By a CTA: rows to another rank, then 1 to a word there.
  __device__ __forceinline__ void put(int64_t target, int64_t source, int64_t bytes, int64_t word,
                                      int peer) const {
    nvshmemx_putmem_signal_nbi_block(arena_ + target, arena_ + source, static_cast<size_t>(bytes),
                                     at(word), 1, NVSHMEM_SIGNAL_ADD, peer);
  }

  // By a thread: 1 to a word of another rank, behind what this thread has stored or knows to be
  // stored in memory that is near. Each word has one rank that adds, so all of it is done here, or
  // all by the network: NVSHMEM itself would take the network card in a job that has one.
  __device__ __forceinline__ void add(int64_t word, int peer) const {
    if (char* there = near(word, peer))
      add_release_system(there, 1);
    else
      nvshmemx_signal_op(at(word), 1, NVSHMEM_SIGNAL_ADD, peer);
  }

  // By a thread: a word of this rank. Rows that it counts are there for who then meets the others.
  __device__ __forceinline__ uint64_t read(int64_t word) const {
    return nvshmem_signal_fetch(at(word));
  }

  // By a CTA: its puts have read their sources.
  __device__ __forceinline__ void drain() const {
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();
  }

 private:
  __device__ __forceinline__ uint64_t* at(int64_t word) const {
    return reinterpret_cast<uint64_t*>(arena_ + word);
  }
  char* arena_;
};

}  // namespace comm
}  // namespace magi
