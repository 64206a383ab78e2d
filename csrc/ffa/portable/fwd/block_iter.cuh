// SPDX-License-Identifier: Apache-2.0
// How a CTA iterates over the key blocks of a work tile: segment by segment, from the right. One
// warp goes ahead; its position lies in shared memory, because the arithmetic has no registers
// left.
#pragma once

#include "ffa/common/part.cuh"
#include "device/shared.cuh"
#include "ffa/portable/fwd/config.h"
#include "ffa/portable/fwd/params.h"
#include "ffa/portable/plan_reader.cuh"

namespace magi::portable {

// A block of keys.
struct KeyBlock {
  int k1;           // right end; there is no block if `exists` is false
  uint32_t record;  // of its segment, in shared memory
  bool exists;
};

template <typename C>
__device__ __forceinline__ uint32_t record_at(const FwdKernelParams& p, uint32_t smem, int slot) {
  return smem + C::kRecordsAt + slot * C::record_bytes(p.tile_tokens);
}

// All threads, behind a barrier that follows what the warp left there.
template <typename C>
__device__ __forceinline__ KeyBlock block_at_hand(const FwdKernelParams& p, uint32_t smem) {
  const int4 at = lds_int4(smem + C::kBlockAt);
  return {at.x, record_at<C>(p, smem, at.z), at.x > at.y};
}

// One warp: on to the next segment, `first` of those before `end`, of which this part of the tile
// has blocks. Two records are kept, so that the warp may be one block ahead of the arithmetic.
template <typename C>
__device__ __forceinline__ void enter_segment(const FwdKernelParams& p, uint32_t smem, Part part,
                                              int first, int end, int slot, int lane) {
  int2 visit = make_int2(0, 0);
  const int32_t* from = nullptr;
  while (first < end && visit.y <= visit.x) {
    from = PlanReader{p.plan}.record(first++);
    visit = part.piece<C>(*reinterpret_cast<const int2*>(from));
  }
  if (visit.y > visit.x)
    for (int i = lane; i < static_cast<int>(C::record_bytes(p.tile_tokens) / 16); i += 32) {
      const int4 words = reinterpret_cast<const int4*>(from)[i];
      sts_int4(record_at<C>(p, smem, slot) + 16 * i, words.x, words.y, words.z, words.w);
    }
  __syncwarp();  // all lanes have read where the warp was
  if (lane != 0) return;
  sts_int4(smem + C::kBlockAt, visit.y, visit.x, slot, first);
  sts_int(smem + C::kBlockAt + 16, end);
}

// One warp: the first block of the work tile in `work`.
template <typename C>
__device__ __forceinline__ void start_blocks(const FwdKernelParams& p, uint32_t smem, uint32_t work,
                                             int lane) {
  const magi_tile_desc& desc = PlanReader{p.plan}.tile(lds_int(work));
  const int first = desc.segment_begin, end = first + desc.num_segments;
  enter_segment<C>(p, smem, Part::of_word(lds_int(work + 8)), first, end, 0, lane);
}

// One warp: the next block.
template <typename C>
__device__ __forceinline__ void advance_block(const FwdKernelParams& p, uint32_t smem,
                                              uint32_t work, int lane) {
  const int4 at = lds_int4(smem + C::kBlockAt);
  const int end = lds_int(smem + C::kBlockAt + 16);
  if (at.x - C::kBlockN > at.y) {
    __syncwarp();
    if (lane == 0) sts_int(smem + C::kBlockAt, at.x - C::kBlockN);
    return;
  }
  enter_segment<C>(p, smem, Part::of_word(lds_int(work + 8)), at.w, end, at.z ^ 1, lane);
}

}  // namespace magi::portable
