// SPDX-License-Identifier: Apache-2.0
// Schedules the work tiles of a kernel: one lane per CTA takes them from a counter, the heaviest
// first, and stages them and the segment records of their tiles in shared memory. A work tile is a
// tile of the plan for one head unit, or a part of that.
#pragma once

#include <climits>
#include <cstddef>

#include "magi/abi.h"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/shared.cuh"
#include "ffa/common/work_order.cuh"

namespace magi {

constexpr int kNoPart = INT_MIN;

// How far a role is, in one register: work tiles so far in the low two bits, segments so far above.
// Both rings have two stages; K and V have one, whose phase changes with every work tile.
struct PipelineState {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t work_stage() const { return count & 1; }
  __device__ __forceinline__ uint32_t work_phase() const { return count >> 1 & 1; }
  __device__ __forceinline__ uint32_t kv_phase() const { return count & 1; }
  __device__ __forceinline__ uint32_t segment_stage() const { return count >> 2 & 1; }
  __device__ __forceinline__ uint32_t segment_phase() const { return count >> 3 & 1; }
  __device__ __forceinline__ void next_work() { count = (count & ~3u) | ((count + 1) & 3); }
  __device__ __forceinline__ void next_segment() { count += 4; }
};

// Stages the segment records of a tile; `desc` is where they begin and how many they are.
template <typename P, typename Smem>
__device__ __forceinline__ void stage_segments(const P& p, const Smem& smem, PipelineState& state,
                                               int2 desc, int records_at, int segment_words) {
  const int32_t* record = p.plan + records_at + static_cast<int64_t>(desc.x) * segment_words;
#pragma unroll 1
  for (int left = desc.y; left > 0; --left, record += segment_words) {
    mbar_wait(smem.segment_empty(state.segment_stage()), state.segment_phase() ^ 1);
    mbar_expect(smem.segment_full(state.segment_stage()), segment_words * 4);
    load_bytes(smem.segment(state.segment_stage()), record, segment_words * 4,
               smem.segment_full(state.segment_stage()));
    state.next_segment();
  }
}

// Publishes a work tile and stages the segment records of its tile.
template <typename P, typename Smem>
__device__ __forceinline__ void publish_work_tile(const P& p, const Smem& smem,
                                                  PipelineState& state, int tile, int head_unit,
                                                  int2 desc, int word, int records_at,
                                                  int segment_words) {
  mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
  sts_int4(smem.work_tile(state.work_stage()), tile, head_unit, desc.y, word);
  mbar_arrive(smem.work_full(state.work_stage()));
  state.next_work();
  stage_segments(p, smem, state, desc, records_at, segment_words);
}

// Publishes that there is no more work.
template <typename Smem>
__device__ __forceinline__ void publish_none(const Smem& smem, const PipelineState& state) {
  mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
  sts_int4(smem.work_tile(state.work_stage()), -1, -1, -1, -1);
  mbar_arrive(smem.work_full(state.work_stage()));
}

// The last CTA to get here, when it has taken its last work tile, resets the counter for the next
// launch on this stream.
template <typename P>
__device__ __forceinline__ void leave_work_tiles(const P& p) {
  __threadfence();
  if (atomicInc(reinterpret_cast<unsigned*>(p.workspace) + 1, gridDim.x - 1) == gridDim.x - 1)
    p.workspace[0] = 0;
}

template <typename P, typename Smem>
__device__ __forceinline__ void publish_end(const P& p, const Smem& smem,
                                            const PipelineState& state) {
  publish_none(smem, state);
  leave_work_tiles(p);
}

// One lane. Publishes work tiles and stages the segment records of each in shared memory. A work
// tile is taken as late as its look-ups allow, when `issued` says that few copies of the one before
// are left: with tiles taken earlier the last ones would not go to the CTAs that are free first.
//
// `coords(work tile, &order_idx, &head_unit, &part)` says what each of the `total` is, and
// `part_of(where the tile's description is in the plan, order_idx, part)` gives the fourth word of
// the work tile, or kNoPart. Returns what would be published next.
template <typename P, typename Smem, typename Coords, typename PartOf>
__device__ __forceinline__ PipelineState schedule_work_tiles(const P& p, const Smem& smem,
                                                             int total, Coords coords,
                                                             PartOf part_of) {
  // Offsets rather than pointers, to save registers.
  const int32_t* header = p.plan;
  const int32_t tiles_at = header[offsetof(magi_tile_plan_header, words_tiles) / 4];
  const int32_t order_at = header[offsetof(magi_tile_plan_header, words_order) / 4];
  const int32_t first_order_at = header[offsetof(magi_tile_plan_header, words_first_order) / 4];
  const int32_t records_at = header[offsetof(magi_tile_plan_header, words_records) / 4];
  const int32_t segment_words = header[offsetof(magi_tile_plan_header, segment_words) / 4];
  PipelineState state;
#pragma unroll 1
  for (int work_tile = blockIdx.x; work_tile < total;
       work_tile = atomicAdd(p.workspace, 1) + gridDim.x) {
    int order_idx = 0, head_unit = 0, part = 0;
    coords(work_tile, &order_idx, &head_unit, &part);
    // A work tile is of the first L2 group if its head is.
    const int tile = tile_of(p, order_at, first_order_at, head_unit * p.num_tiles, order_idx);
    const int word = part_of(tiles_at + 8 * tile, order_idx, part);
    if (word == kNoPart) continue;
    const int2 segments = *reinterpret_cast<const int2*>(  // first record, number of records
        p.plan + tiles_at + 8 * tile + offsetof(magi_tile_desc, segment_begin) / 4);
    publish_work_tile(p, smem, state, tile, head_unit, segments, word, records_at, segment_words);
    mbar_wait(smem.issued(), state.work_stage() ^ 1);  // a phase for each work tile
  }
  publish_end(p, smem, state);
  return state;
}

}  // namespace magi
