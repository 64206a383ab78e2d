// SPDX-License-Identifier: Apache-2.0
// From lists of key blocks, one for each query block, to lists of query blocks, one for each tile
// of 128 keys.
#pragma once

#include "ffa/sm90/index/bwd/keys/params.h"
#include "ffa/sm90/index/sum_before.cuh"

namespace magi {

// Place of the first of `count` ascending entries that is not below `least`.
__device__ __forceinline__ int lower_bound(const int32_t* entries, int count, int least) {
  int begin = 0, end = count;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (__ldg(entries + middle) < least)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Which granules of a tile a list of key blocks has. Blocks are whole granules.
__device__ __forceinline__ uint32_t listed_granules(const int32_t* entries, int count, int k_block,
                                                    int tile) {
  const int64_t first = static_cast<int64_t>(tile) * kTileBlockN;
  uint32_t granules = 0;
  for (int i = lower_bound(entries, count, static_cast<int>(first / k_block)); i < count; ++i) {
    const int64_t start = static_cast<int64_t>(__ldg(entries + i)) * k_block - first;
    if (start >= kTileBlockN) break;
    const int from = static_cast<int>(start > 0 ? start : 0) / kGranule;
    const int to =
        static_cast<int>(min(start + k_block, static_cast<int64_t>(kTileBlockN))) / kGranule;
    granules |= (1u << to) - (1u << from);
  }
  return granules;
}

// One CTA for a tile and kv head.
__global__ void __launch_bounds__(kPrepareThreads) index_query_lists(const QueryListParams p) {
  __shared__ uint32_t warps[kPrepareWarps];
  __shared__ uint32_t any;
  const int tile = blockIdx.x, head = blockIdx.y;
  const int64_t number = static_cast<int64_t>(head) * p.lists.num_tiles + tile;
  int32_t* to = p.lists.entries + number * p.lists.num_lists;
  if (threadIdx.x == 0) any = 0;
  int count = 0;
  uint32_t mine = 0;
  for (int first = 0; first < p.lists.num_lists; first += kPrepareThreads) {
    const int list = first + threadIdx.x;
    uint32_t granules = 0;
    if (list < p.lists.num_lists) {
      const int64_t row = static_cast<int64_t>(list) * p.heads_kv + head;
      granules = listed_granules(p.key_lists + row * p.max_entries, __ldg(p.counts + row),
                                 p.k_block, tile);
    }
    int total;
    const int place = count + sum_before(granules != 0 ? 1 : 0, warps, &total);
    if (granules != 0) to[place] = list << kGranules | static_cast<int>(granules);
    mine |= granules;
    count += total;
  }
  if (mine != 0) atomicOr(&any, mine);
  __syncthreads();
  if (threadIdx.x == 0) p.lists.tiles[number] = make_int2(count, static_cast<int>(any));
  if (threadIdx.x < 2) p.lists.summed_heads[2 * number + threadIdx.x] = 0;
}

}  // namespace magi
