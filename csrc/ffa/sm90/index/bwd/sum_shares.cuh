// SPDX-License-Identifier: Apache-2.0
// Adds the shares that lists left of a key to its gradient, in the order of the inverted lists: a
// warp for each row.
#pragma once

#include <cstdint>

#include "magi/index.h"

namespace magi {

constexpr int kSumThreads = 256;

// The first of `begin` to before `end` whose value is not below `value`; `end` if there is none.
__device__ __forceinline__ int first_not_below(const int32_t* ascending, int begin, int end,
                                               int64_t value) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (__ldg(ascending + middle) < value)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// The row of partials that the first tile of a list left of a key, at `offset` in the block that
// place `reader` names; -1 if the list does not see the key.
__device__ __forceinline__ int64_t share_of(const magi_ffa_index_sum_params& p, int reader,
                                            int offset) {
  const int number = reader / p.max_entries;
  const int64_t slot = static_cast<int64_t>(reader - number * p.max_entries) * p.k_block + offset;
  if (slot >= __ldg(p.key_counts + number)) return -1;
  const int64_t tile = static_cast<int64_t>(number - p.list_begin * p.heads_kv) * p.num_tiles;
  return tile * p.max_entries * p.k_block + slot;
}

__global__ void __launch_bounds__(kSumThreads) index_sum_shares(const magi_ffa_index_sum_params p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSumThreads / 32) + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(p.total_k) * p.heads_kv) return;
  const int key = static_cast<int>(row / p.heads_kv), head = static_cast<int>(row % p.heads_kv);
  const int lane = threadIdx.x % 32;
  const int64_t places = static_cast<int64_t>(p.heads_kv) * p.max_entries;
  const int64_t tile_rows = static_cast<int64_t>(p.max_entries) * p.k_block;
  // The blocks that may have the key, by number of their first key.
  const int first = p.has_starts ? max(key - p.k_block + 1, 0) : key / p.k_block;
  const int last = p.has_starts ? key : first;
  for (int column = lane * 4; column - lane * 4 < p.width; column += 128) {
    const bool is_inside = column < p.width;
    float4* at = reinterpret_cast<float4*>(p.sums + row * p.width + (is_inside ? column : 0));
    float4 sum = *at;
    for (int block = first; block <= last; ++block) {
      const int32_t* begins = p.reader_begins + static_cast<int64_t>(block) * p.heads_kv + head;
      int begin = __ldg(begins), end = __ldg(begins + 1);
      begin = first_not_below(p.readers, begin, end, p.list_begin * places);
      end = first_not_below(p.readers, begin, end, p.list_end * places);
      const int offset = key - (p.has_starts ? block : block * p.k_block);
      for (int i = begin; i < end; i += 32) {
        // A lane looks up one share of up to 32.
        const int64_t mine = i + lane < end ? share_of(p, __ldg(p.readers + i + lane), offset) : -1;
        const int count = min(32, end - i);
        for (int j = 0; j < count; ++j) {
          const auto from = static_cast<int64_t>(
              __shfl_sync(0xffffffff, static_cast<unsigned long long>(mine), j));
          if (from < 0 || !is_inside) continue;
          for (int tile = 0; tile < p.num_tiles; ++tile) {
            const float4 share = __ldg(reinterpret_cast<const float4*>(
                p.partials + (from + tile * tile_rows) * p.width + column));
            sum.x += share.x;
            sum.y += share.y;
            sum.z += share.z;
            sum.w += share.w;
          }
        }
      }
    }
    if (is_inside) *at = sum;
  }
}

}  // namespace magi
