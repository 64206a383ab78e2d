// SPDX-License-Identifier: Apache-2.0
// How kernels read a tile plan where it lies, in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "magi/abi.h"

namespace magi::portable {

constexpr int kSegmentHeaderWords = 32;

struct PlanReader {
  const int32_t* plan;

  __device__ const magi_tile_plan_header& header() const {
    return *reinterpret_cast<const magi_tile_plan_header*>(plan);
  }
  __device__ bool fits(int total_q, int total_k, int tile_tokens, int num_groups) const {
    const magi_tile_plan_header& h = header();
    return h.status == 0 && h.total_q == total_q && h.total_k == total_k &&
           h.tile_tokens == tile_tokens && h.num_groups == num_groups;
  }
  __device__ const magi_tile_desc& tile(int i) const {
    return reinterpret_cast<const magi_tile_desc*>(plan + header().words_tiles)[i];
  }
  // The record of a segment, whose row intervals begin kSegmentHeaderWords behind.
  __device__ const int32_t* record(int segment) const {
    return plan + header().words_records + static_cast<int64_t>(segment) * header().segment_words;
  }
};

__device__ __forceinline__ const magi_tile_segment& segment_of(const int32_t* record) {
  return *reinterpret_cast<const magi_tile_segment*>(record);
}

}  // namespace magi::portable
