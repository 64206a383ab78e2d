// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs take the lists of a kv head: the longest first, so that CTAs end
// together; of equal ones the last queries first, so that neighbours are at work together.
#pragma once

#include <cstdint>

#include "ffa/sm90/index/fwd/blocks/params.h"

namespace magi {

constexpr int kOrderThreads = 256;

// A thread for each list of the kv head blockIdx.y, which counts those that come before it.
__global__ void __launch_bounds__(kOrderThreads) index_order_lists(const ListOrderParams p) {
  __shared__ int counts[kOrderThreads];
  const int head = blockIdx.y, list = blockIdx.x * kOrderThreads + threadIdx.x;
  auto count_of = [&](int of) {  // -1 behind the last, which comes before none
    return of < p.num_lists ? p.counts[static_cast<int64_t>(of) * p.heads_kv + head] : -1;
  };
  if (head == 0 && list == 0) *p.counter = 0;
  const int mine = count_of(list);
  int place = 0;
  for (int first = 0; first < p.num_lists; first += kOrderThreads) {
    __syncthreads();
    counts[threadIdx.x] = count_of(first + static_cast<int>(threadIdx.x));
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < kOrderThreads; ++i) place += counts[i] + (first + i > list) > mine;
  }
  if (list < p.num_lists) p.order[static_cast<int64_t>(head) * p.num_lists + place] = list;
}

}  // namespace magi
