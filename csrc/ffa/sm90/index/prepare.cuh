// SPDX-License-Identifier: Apache-2.0
// Lists as kernels of index attention read them, ascending and every entry once: from lists in any
// order by a bit for each possible entry, and from the rows of a block mask.
#pragma once

#include <cstdint>

#include "ffa/sm90/index/sum_before.cuh"
#include "magi/index.h"

namespace magi {

inline int64_t prepare_words(const magi_ffa_index_prepare_params& p) {
  const int64_t entries = (static_cast<int64_t>(p.total_k) + p.k_block - 1) / p.k_block;
  return (entries + 32ll * kPrepareThreads - 1) / (32ll * kPrepareThreads) * kPrepareThreads;
}

inline int64_t prepare_bytes(const magi_ffa_index_prepare_params& p) {
  return 4 * (kPrepareWarps + prepare_words(p));
}

// One CTA for a list.
template <typename Index>
__global__ void __launch_bounds__(kPrepareThreads)
    index_prepare_lists(const magi_ffa_index_prepare_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  uint32_t* warps = reinterpret_cast<uint32_t*>(raw);
  uint32_t* bits = warps + kPrepareWarps;
  const int list = blockIdx.x, num_words = static_cast<int>(p.num_words);
  for (int i = threadIdx.x; i < num_words; i += kPrepareThreads) bits[i] = 0;
  __syncthreads();
  const int64_t start = p.k_starts != nullptr ? p.k_starts[list / p.heads_kv] : 0;
  const Index* from =
      static_cast<const Index*>(p.indices) + static_cast<int64_t>(list) * p.max_entries;
  for (int i = threadIdx.x; i < p.max_entries; i += kPrepareThreads) {
    const int64_t entry = from[i];
    if (entry < 0 || entry > p.total_k || start + entry * p.k_block >= p.total_k) continue;
    atomicOr(bits + entry / 32, 1u << (entry % 32));
  }
  __syncthreads();
  int32_t* to = p.lists + static_cast<int64_t>(list) * p.max_entries;
  int count = 0;
  for (int first = 0; first < num_words; first += kPrepareThreads) {
    uint32_t word = bits[first + threadIdx.x];
    int total;
    int place = count + sum_before(__popc(word), warps, &total);
    const int entry = 32 * (first + static_cast<int>(threadIdx.x));
    for (; word != 0; word &= word - 1) to[place++] = entry + __ffs(static_cast<int>(word)) - 1;
    count += total;
  }
  for (int i = count + threadIdx.x; i < p.max_entries; i += kPrepareThreads) to[i] = -1;
  if (threadIdx.x == 0) p.counts[list] = count;
}

// One warp for a row of blocks, which becomes a list. max_entries is the length of a row.
__global__ void __launch_bounds__(kPrepareThreads)
    index_lists_of_blocks(const magi_ffa_index_prepare_params p) {
  const int list = blockIdx.x * kPrepareWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (list >= p.num_lists * p.heads_kv) return;
  const int64_t at = static_cast<int64_t>(list) * p.max_entries;
  const uint8_t* from = static_cast<const uint8_t*>(p.indices) + at;
  int count = 0;
  for (int first = 0; first < p.max_entries; first += 32) {
    const int entry = first + lane;
    const bool is_set = entry < p.max_entries && from[entry] != 0;
    const uint32_t set = __ballot_sync(kAllLanes, is_set);
    if (is_set) p.lists[at + count + __popc(set & ((1u << lane) - 1))] = entry;
    count += __popc(set);
  }
  for (int i = count + lane; i < p.max_entries; i += 32) p.lists[at + i] = -1;
  if (lane == 0) p.counts[list] = count;
}

}  // namespace magi
