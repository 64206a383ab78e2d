// SPDX-License-Identifier: Apache-2.0
// The work tiles of one CTA of index attention.
#pragma once

namespace magi {

// Every gridDim.x-th, from the last token on, whose lists are the longest of a causal mask.
// Neighbours are at work at the same time, because they share keys.
struct TileWalk {
  int number;

  __device__ explicit TileWalk(int num_tiles)
      : number(num_tiles - 1 - static_cast<int>(blockIdx.x)) {}
  __device__ bool is_over() const { return number < 0; }
  __device__ void advance() { number -= gridDim.x; }
};

}  // namespace magi
