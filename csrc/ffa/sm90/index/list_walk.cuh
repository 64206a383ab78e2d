// SPDX-License-Identifier: Apache-2.0
// The lists of keys that one CTA of index attention works on.
#pragma once

namespace magi {

// Every gridDim.x-th list, from the last token on, whose lists are the longest of a causal mask.
// Neighbours are at work at the same time, because they share keys.
struct ListWalk {
  int list;

  __device__ explicit ListWalk(int num_lists)
      : list(num_lists - 1 - static_cast<int>(blockIdx.x)) {}
  __device__ bool is_over() const { return list < 0; }
  __device__ void advance() { list -= gridDim.x; }
};

}  // namespace magi
