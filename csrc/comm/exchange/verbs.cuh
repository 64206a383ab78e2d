// SPDX-License-Identifier: Apache-2.0
// Waiting for signals with an end, and rows to memory that loads and stores reach, on top of the
// verbs of a network; and what launchers check alike.
#pragma once

#include "comm/symm/signal.cuh"
#include "ffa/common/host.h"
#include "magi/comm.h"
#ifdef MAGI_COMM_GIN
#include "comm/networks/gin/verbs.cuh"
#else
#include "comm/networks/nvshmem/verbs.cuh"
#endif

namespace magi {
namespace comm {

__device__ __forceinline__ char* place(const magi_comm_epoch& e, int64_t at) {
  return static_cast<char*>(e.arena) + at;
}

// Place of a signal.
__device__ __forceinline__ int64_t signal_at(const magi_comm_epoch& e, int64_t signal) {
  return e.signals_at + signal * static_cast<int64_t>(sizeof(uint64_t));
}

// What the epochs that are over have added to a signal.
__device__ __forceinline__ uint64_t* total_word(const magi_comm_epoch& e, int64_t signal) {
  return reinterpret_cast<uint64_t*>(place(e, e.totals_at)) + signal;
}

// Epochs that are over on this rank.
__device__ __forceinline__ uint64_t* epoch_word(const magi_comm_epoch& e) {
  return reinterpret_cast<uint64_t*>(place(e, e.epoch_at));
}

// Has a wait of this rank been in vain? Then it sends nothing any more. In device memory, as many
// reads of host memory by a grid would slow down what the ranks send.
__device__ __forceinline__ volatile uint64_t* void_word(const magi_comm_epoch& e) {
  return reinterpret_cast<volatile uint64_t*>(place(e, e.failed_at));
}

// Kernels of a rank wait for several ranks at a time, and some of those wait, too. So every wait
// that ends in vain says for whom it was, not only the first: two ranks that each named the other
// would hide the third, for whom both wait.
__device__ __forceinline__ void give_up(const magi_comm_epoch& e, int64_t awaited) {
  *void_word(e) = 1;
  reinterpret_cast<volatile int32_t*>(e.failed_peer)[1 + awaited] = 1;
}

// By one thread: until the signal of a row of a table has counted so many; false if in vain.
__device__ __forceinline__ bool wait_until(const Network& network, const magi_comm_epoch& e,
                                           const int64_t* wait, uint64_t count) {
  const int64_t word = signal_at(e, wait[0]);
  const uint32_t begun = milliseconds();
  uint32_t last = begun;
#pragma unroll 1
  while (network.read(word) < count) {
    __nanosleep(kLookEveryNs);
    const uint32_t now = milliseconds();
    if (now == last) continue;
    last = now;
    if (has_failed(e.timeout_ms, e.failed_peer, static_cast<int>(wait[2]), now - begun)) {
      give_up(e, wait[2]);
      return false;
    }
  }
  return true;
}

// By a CTA: until all of these signals have counted what this epoch adds to them, or, if they are
// credits, all epochs that are over. False if this rank has waited in vain, then or before.
template <bool kAreCredits>
__device__ __forceinline__ bool wait_for_all(const Network& network, const magi_comm_epoch& e,
                                             const int64_t* waits, int64_t count) {
  bool is_fine = *void_word(e) == 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; is_fine && i < count; i += blockDim.x) {
    const int64_t* wait = waits + i * MAGI_COMM_WAIT_WORDS;
    const uint64_t before = kAreCredits ? 0 : *total_word(e, wait[0]);
    const uint64_t epochs = kAreCredits ? *epoch_word(e) : 1;
    is_fine = wait_until(network, e, wait, before + epochs * static_cast<uint64_t>(wait[1]));
  }
  __threadfence_system();
  return __syncthreads_and(is_fine);
}

// Loads of a thread that are on their way at a time. With one, as NVSHMEM copies, a CTA of 512
// threads moves 13 GB/s: memory answers in about 600 ns, and has 8 KiB to bring then.
constexpr int kLoadsAtOnce = 8;

// By a CTA: a multiple of 16 bytes. Past the first cache, as other GPUs may have written them.
__device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const int64_t count = bytes / 16, step = blockDim.x;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += kLoadsAtOnce * step) {
    uint4 words[kLoadsAtOnce];
#pragma unroll
    for (int k = 0; k < kLoadsAtOnce; ++k)
      if (i + k * step < count) words[k] = __ldcs(source + i + k * step);
#pragma unroll
    for (int k = 0; k < kLoadsAtOnce; ++k)
      if (i + k * step < count) target[i + k * step] = words[k];
  }
}

// By a CTA: 1 to a signal of a rank that is near, behind what the CTA has stored there. The other
// warps go on while the first one waits for that to arrive.
__device__ __forceinline__ void signal_stores(const Network& network, const magi_comm_epoch& e,
                                              int64_t signal, int peer) {
  __syncthreads();
  if (threadIdx.x == 0) network.add(signal_at(e, signal), peer);
}

// By a CTA: rows to another rank, then 1 to a signal there.
__device__ __forceinline__ void put_rows(const Network& network, const magi_comm_epoch& e,
                                         int64_t target, int64_t source, int64_t bytes,
                                         int64_t signal, int peer) {
  char* there = network.near(target, peer);
  if (there == nullptr) return network.put(target, source, bytes, signal_at(e, signal), peer);
  copy_bytes(there, place(e, source), bytes);
  signal_stores(network, e, signal, peer);
}

constexpr int kCommPutThreads = 512;

// By num_ctas CTAs: all puts of a table. A CTA takes every num_ctas-th, so those that wait for
// nothing, which come first, are on their way before any CTA waits.
__device__ __forceinline__ void put_all(const Network& network, const magi_comm_put_params& p) {
  if (!wait_for_all<true>(network, p.epoch, p.credits, p.num_credits)) return;
#pragma unroll 1
  for (int i = blockIdx.x; i < p.num_puts; i += p.num_ctas) {
    const int64_t* put = p.puts + static_cast<int64_t>(i) * MAGI_COMM_PUT_WORDS;
    if (put[5] >= 0 && !wait_for_all<false>(network, p.epoch, put + 5, 1)) break;
    put_rows(network, p.epoch, put[1], put[0], put[2], put[4], static_cast<int>(put[3]));
  }
  network.drain();
}

}  // namespace comm
}  // namespace magi

extern "C" {
// By the host code of the network: may launches begin, and is the caller's header this one?
magi_status magi_comm_check(int32_t version);
}
