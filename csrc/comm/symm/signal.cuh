// SPDX-License-Identifier: Apache-2.0
// Control words of a buffer on the device, and waiting for them with an end.
#pragma once

#include <cstdint>

#include "device/system_words.cuh"
#include "magi/symm.h"

namespace magi {

constexpr int kLookEveryNs = 500;

__device__ __forceinline__ uint32_t* symm_word(const void* buffer, int word) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(const_cast<void*>(buffer)) +
                                     static_cast<int64_t>(word) * MAGI_SYMM_WORD_BYTES);
}

__device__ __forceinline__ uint32_t* symm_word(int64_t buffer, int word) {
  return symm_word(reinterpret_cast<void*>(buffer), word);
}

// Once a millisecond of a wait that has lasted so many: whether to give up, because ranks have
// failed or it has lasted too long.
__device__ __forceinline__ bool has_failed(uint32_t timeout_ms, int32_t* failed_peer, int awaited,
                                           uint32_t waited_ms) {
  if (*reinterpret_cast<volatile int32_t*>(failed_peer) != 0) return true;
  if (waited_ms < timeout_ms) return false;
  *reinterpret_cast<volatile int32_t*>(failed_peer) = awaited + 1;
  return true;
}

// Until *word is at least `target`, counting modulo 2^32. `awaited` is who is waited for. Looks
// seldom, because many looks at one word slow down who writes it and whoever writes near it.
// *failed_peer is in host memory: it is looked at once a millisecond, and never in a shorter wait.
// Read by a hundred CTAs that begin to wait, it stopped whatever the ranks sent for 100 us each
// time.
__device__ __forceinline__ void wait_for_word(const uint32_t* word, uint32_t target,
                                              uint32_t timeout_ms, int32_t* failed_peer,
                                              int awaited) {
  if (static_cast<int32_t>(load_acquire_system(word) - target) >= 0) return;
  const uint32_t begun = milliseconds();
  uint32_t last = begun;
#pragma unroll 1
  while (static_cast<int32_t>(load_acquire_system(word) - target) < 0) {
    __nanosleep(kLookEveryNs);
    const uint32_t now = milliseconds();
    if (now == last) continue;
    last = now;
    if (has_failed(timeout_ms, failed_peer, awaited, now - begun)) return;
  }
}

// By all threads of every CTA of a grid, when its work is done: true in the CTA that comes last.
// `count` is 0 between grids.
__device__ __forceinline__ bool is_last_cta(uint32_t* count) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(count, 1) + 1 == gridDim.x;
    if (is_last) *count = 0;
  }
  __syncthreads();
  return is_last;
}

// By one CTA, after what it guards is over on this rank: counts the epoch, and tells every rank.
__device__ __forceinline__ void release_buffer(const magi_symm_buffer& buffer, int rank,
                                               int world) {
  const uint32_t epochs = *symm_word(buffer.own, MAGI_SYMM_EPOCH) + 1;
  __syncthreads();
  for (int peer = threadIdx.x; peer < world; peer += blockDim.x)
    store_release_system(symm_word(buffer.of_rank[peer], MAGI_SYMM_CREDIT(world, rank)), epochs);
  if (threadIdx.x == 0) *symm_word(buffer.own, MAGI_SYMM_EPOCH) = epochs;
}

// The same for a buffer into which this rank puts: when all of its puts are done.
__device__ __forceinline__ void release_put_buffer(const magi_symm_buffer& buffer, int rank,
                                                   int world, uint32_t timeout_ms,
                                                   int32_t* failed_peer) {
  wait_for_word(symm_word(buffer.own, MAGI_SYMM_PUT_DONE),
                *symm_word(buffer.own, MAGI_SYMM_EPOCH) + 1, timeout_ms, failed_peer, rank);
  __syncthreads();
  release_buffer(buffer, rank, world);
}

// That by one thread.
__device__ __forceinline__ void release_put_buffer_alone(const magi_symm_buffer& buffer, int rank,
                                                         int world, uint32_t timeout_ms,
                                                         int32_t* failed_peer) {
  const uint32_t epochs = *symm_word(buffer.own, MAGI_SYMM_EPOCH) + 1;
  wait_for_word(symm_word(buffer.own, MAGI_SYMM_PUT_DONE), epochs, timeout_ms, failed_peer, rank);
#pragma unroll 1
  for (int peer = 0; peer < world; ++peer)
    store_release_system(symm_word(buffer.of_rank[peer], MAGI_SYMM_CREDIT(world, rank)), epochs);
  *symm_word(buffer.own, MAGI_SYMM_EPOCH) = epochs;
}

// By the last CTA of a kernel that takes rows out of the buffer.
template <typename Params>
__device__ __forceinline__ void end_epoch(const Params& p) {
  if (!is_last_cta(symm_word(p.buffer.own, MAGI_SYMM_UNPACK_CTAS(p.world)))) return;
  __threadfence_system();
  release_put_buffer(p.buffer, p.rank, p.world, p.timeout_ms, p.failed_peer);
}

}  // namespace magi
