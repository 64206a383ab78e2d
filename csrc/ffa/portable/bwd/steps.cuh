// SPDX-License-Identifier: Apache-2.0
// How a CTA iterates over a work tile of the backward: for each query head, segment by segment, the
// blocks of queries from the last to the first. One warp prefetches the segments into shared
// memory.
#pragma once

#include <climits>

#include "device/shared.cuh"
#include "ffa/portable/bwd/config.h"
#include "ffa/portable/bwd/params.h"
#include "ffa/portable/plan_reader.cuh"

namespace magi::portable {

// A segment of the work tile for one query head, twelve words of shared memory: last block of
// queries (-1: the work tile is over), first block, head, number of the segment; words from the
// start of the plan to its record, has_unseen of the plan, two words of nothing; for both row
// groups which queries all of their keys see. Fields are read where they are needed.
constexpr uint32_t kSegmentBytes = 48;

__device__ __forceinline__ int last_block(uint32_t segment) { return lds_int(segment); }
__device__ __forceinline__ int first_block(uint32_t segment) { return lds_int(segment + 4); }
__device__ __forceinline__ int head_of(uint32_t segment) { return lds_int(segment + 8); }
__device__ __forceinline__ int number_of(uint32_t segment) { return lds_int(segment + 12); }
__device__ __forceinline__ int record_of(uint32_t segment) { return lds_int(segment + 16); }
__device__ __forceinline__ int2 full_of(uint32_t segment, int group) {
  return lds_int2(segment + 32 + 8 * group);
}

// Whether some queries of a block may be seen by no key. Blocks reach beyond what the segment
// visits, so what the plan says of the segment does not do.
template <typename C>
__device__ __forceinline__ bool may_be_unseen(uint32_t segment, int block) {
  if (lds_int(segment + 20) == 0) return false;
  const int first = block * C::kBlockM;
  bool seen = false;
  for (int group = 0; group < C::kGroups; ++group) {
    const int2 full = full_of(segment, group);
    seen |= first >= full.x && first + C::kBlockM <= full.y;
  }
  return !seen;
}

// Three are kept: the one at hand, the next, whose operands may be on their way, and the one
// behind.
template <typename C>
__device__ __forceinline__ uint32_t first_segment(uint32_t smem) {
  return smem + C::kSegmentsAt;
}

template <typename C>
__device__ __forceinline__ uint32_t segment_behind(uint32_t smem, uint32_t segment) {
  const uint32_t last = smem + C::kSegmentsAt + 2 * kSegmentBytes;
  return segment == last ? smem + C::kSegmentsAt : segment + kSegmentBytes;
}

// A block of queries in a segment.
struct Step {
  uint32_t segment;
  int block;  // negative: the work tile is over
};

template <typename C>
__device__ __forceinline__ Step step_behind(uint32_t smem, Step step) {
  if (step.block != first_block(step.segment)) return {step.segment, step.block - 1};
  const uint32_t next = segment_behind<C>(smem, step.segment);
  return {next, last_block(next)};
}

// [first, end) blocks that a segment visits.
template <typename C>
__device__ __forceinline__ int2 blocks_of(const PlanReader& plan, int segment) {
  const int2 visit = *reinterpret_cast<const int2*>(plan.record(segment));
  if (visit.y <= visit.x) return make_int2(0, 0);
  return make_int2(visit.x / C::kBlockM, (visit.y + C::kBlockM - 1) / C::kBlockM);
}

// What the threads of a CTA know of its work tile, in shared memory: number of the tile, its
// segments [begin, end), first and last query head.
struct TileHeads {
  int tile, begin, end, first_head, last_head;

  template <typename C>
  static __device__ __forceinline__ TileHeads load(uint32_t smem) {
    const int4 words = lds_int4(smem + C::kTileAt);
    return {words.x, words.y, words.z, words.w, lds_int(smem + C::kTileAt + 16)};
  }
};

// One thread: the first segment from `segment` of `head` on that visits any block, to `to`.
template <typename C>
__device__ __forceinline__ void enter_segment(const BwdKernelParams& p, const TileHeads& tile,
                                              uint32_t to, int head, int segment) {
  const PlanReader plan{p.plan};
  for (; head <= tile.last_head && tile.begin < tile.end; ++head, segment = tile.begin)
    for (; segment < tile.end; ++segment) {
      const int2 blocks = blocks_of<C>(plan, segment);
      if (blocks.y <= blocks.x) continue;
      const int32_t* record = plan.record(segment);
      const magi_tile_segment& s = segment_of(record);
      sts_int4(to, blocks.y - 1, blocks.x, head, segment);
      sts_int2(to + 16, static_cast<int>(record - p.plan), plan.header().has_unseen);
      sts_int4(to + 32, s.group[0].full_lo, s.group[0].full_hi, s.group[1].full_lo,
               s.group[1].full_hi);
      return;
    }
  sts_int(to, -1);
}

// One thread: the segment behind the one at `from`.
template <typename C>
__device__ __forceinline__ void follow_segment(const BwdKernelParams& p, uint32_t smem,
                                               uint32_t from) {
  const uint32_t to = segment_behind<C>(smem, from);
  if (last_block(from) < 0)
    sts_int(to, -1);
  else
    enter_segment<C>(p, TileHeads::load<C>(smem), to, head_of(from), number_of(from) + 1);
}

// One thread: the first two segments of a work tile.
template <typename C>
__device__ __forceinline__ void start_segments(const BwdKernelParams& p, uint32_t smem, int which,
                                               int first_head, int num_heads) {
  const magi_tile_desc& desc = PlanReader{p.plan}.tile(which);
  const TileHeads tile{which, desc.segment_begin, desc.segment_begin + desc.num_segments,
                       first_head, first_head + num_heads - 1};
  sts_int4(smem + C::kTileAt, tile.tile, tile.begin, tile.end, tile.first_head);
  sts_int(smem + C::kTileAt + 16, tile.last_head);
  sts_int(smem + C::kOrderAt + 12, 0);  // no run of blocks is known
  const uint32_t first = first_segment<C>(smem);
  enter_segment<C>(p, tile, first, first_head, tile.begin);
  follow_segment<C>(p, smem, first);
}

}  // namespace magi::portable
