// SPDX-License-Identifier: Apache-2.0
// Schedules the work tiles of the backward kernel, in the order of the plan or of the work list: by
// a lane of its own or, with C::kSemaphored, by a lane of the warp that clears rows
// (bwd/producer/row_guard.cuh).
#pragma once

#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/smem.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/bwd/schedule/work_list.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

// In order: how a work tile walks its segments, in its fourth word.
__device__ __forceinline__ int traversal_word(const BwdKernelParams& p, int order_idx) {
  const int flags = p.order[0],
            traversal = static_cast<int>(ordered_traversal(flags, order_idx >= p.wave));
  return traversal << kTraversalBit | (flags & kByHead ? 1 << kByHeadBit : 0) |
         ordered_shift(p.order, order_idx, p.wave) << kShiftBit;
}

// The segments of the work tile that was published last, for the other heads where it is walked
// once for each.
template <typename C>
__device__ __forceinline__ void stage_again(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                            PipelineState& state) {
  const uint32_t at = smem.work_tile(state.work_stage() ^ 1);
  if (!walks_by_head<C>(lds_int(at + 8))) return;
#pragma unroll 1
  for (int head = heads_of_work_tile<C>(p, lds_int(at + 12)); head > 1; --head)
    stage_segments(p, smem, state, segments_of_tile(p.plan, lds_int(at)),
                   reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_records,
                   C::kSegmentBytes / 4);
}

// The pass of a work tile, and its number among those of the pass: what makes dk and dq comes
// before all that makes dv. The second takes half as long, and with both at once CTAs would soon be
// at different blocks of queries, which L2 would hold twice.
template <typename C>
__device__ __forceinline__ int2 pass_of_number(const BwdKernelParams& p, int number) {
  const int of_pass = p.num_tiles * p.head_units * p.splits_per_tile,
            pass = C::kPasses > 1 ? number >= of_pass : 0;
  return make_int2(pass, number - pass * of_pass);
}

// One lane, without a schedule of the host: tiles in the order of the plan. There are few work
// tiles and they are long, so the next one is taken as late as possible, when all copies of the one
// before have been issued: the look-ups then travel behind its last steps.
template <typename C>
__device__ void schedule_in_order(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
#pragma unroll 1
  for (int number = blockIdx.x;
       number < p.num_tiles * p.head_units * p.splits_per_tile * C::kPasses;
       number = atomicAdd(p.workspace, 1) + gridDim.x) {
    const int2 of_pass = pass_of_number<C>(p, number);
    const int work_tile = of_pass.y;
    mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
    const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
    int order_idx, head_unit;
    const int split = work_tile % p.splits_per_tile, unsplit = work_tile / p.splits_per_tile;
    work_tile_coords(p, unsplit, &order_idx, &head_unit);
    const int tile = tile_of(p, plan.words_order, plan.words_first_order, unsplit, order_idx);
    const int descending =
        work_tile % p.work_tiles_per_l2_group >= gridDim.x ? 0 : MAGI_TRAVERSAL_WRAP;
    if constexpr (C::kWorkList) sts_int(smem.m_range(state.work_stage()), kAllBlocks);
    publish_work_tile(p, smem, state, tile, head_unit, segments_of_tile(p.plan, tile),
                      BwdHeadSplit<C>{split, of_pass.x}.word() | descending << kDescendingBit,
                      plan.words_records, C::kSegmentBytes / 4);
    stage_again(p, smem, state);
    mbar_wait(smem.issued(),
              state.work_stage() ^ 1);  // a phase for each work tile, and this one has been counted
  }
  publish_end(p, smem, state);
}

// One lane: `count` work tiles as the host made them, `rows` of magi_work_tile, each for all parts
// of the query heads if those are shared out.
template <typename C>
__device__ void schedule_rows(const BwdKernelParams& p, const BwdSmem<C>& smem, const int32_t* rows,
                              int count) {
  PipelineState state;
#pragma unroll 1
  for (int work_tile = atomicAdd(p.workspace, 1); work_tile < count;
       work_tile = atomicAdd(p.workspace, 1)) {
    mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
    const magi_work_tile* row =
        reinterpret_cast<const magi_work_tile*>(rows) + work_tile / p.splits_per_tile;
    // Field by field: the lane has few registers.
    const int begin = __ldg(&row->m_begin), end = min(__ldg(&row->m_end), 0xffff);
    sts_int(smem.m_range(state.work_stage()), begin | end << 16);
    int word = __ldg(&row->split) + work_tile % p.splits_per_tile;
    if (begin > 0 || end < 0xffff) word = 1 << kCutBit | (begin > 0);
    word |= __ldg(&row->num_descending) << kDescendingBit | (__ldg(&row->partial) + 1)
                                                                << kPartialBit;
    const int tile = __ldg(&row->tile);
    publish_work_tile(p, smem, state, tile, __ldg(&row->head_kv), segments_of_tile(p.plan, tile),
                      word, reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_records,
                      C::kSegmentBytes / 4);
    stage_again(p, smem, state);
    mbar_wait(smem.issued(), state.work_stage() ^ 1);  // as above
  }
  publish_end(p, smem, state);
}

// One lane. Dq is summed in no order.
template <typename C>
__device__ void schedule_bwd(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  if constexpr (C::kWorkList) {
    if (p.work_list != nullptr) {
      const magi_work_list& list = work_list_header(p.work_list);
      schedule_rows(p, smem, p.work_list + list.words_work_tiles, list.num_work_tiles);
      wait_for_kernel_before();  // so that what comes behind this kernel is behind that, too
      return;
    }
    const int at = reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_work_tiles;
    if (at != 0) return schedule_rows(p, smem, p.plan + at, p.num_work_tiles);
  }
  schedule_in_order(p, smem);
}

// Segment `segment` of a tile, to where `staged` counts, when the one before has left that.
template <typename C>
__device__ __forceinline__ void stage_segment(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                              const PipelineState& staged, int tile, int segment) {
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  mbar_wait(smem.segment_empty(staged.segment_stage()), staged.segment_phase() ^ 1);
  mbar_expect(smem.segment_full(staged.segment_stage()), C::kSegmentBytes);
  const int64_t record = segments_of_tile(p.plan, tile).x + segment;
  load_bytes(smem.segment(staged.segment_stage()),
             p.plan + plan.words_records + record * (C::kSegmentBytes / 4), C::kSegmentBytes,
             smem.segment_full(staged.segment_stage()));
}

// Where some tiles are split, in deterministic order: the number of a work tile if none were, and
// in the words of one its part and its stage. Parts of a work tile follow one another.
__device__ __forceinline__ int2 whole_deterministic(const BwdKernelParams& p, int work_tile) {
  const int in_split = work_tile - p.first_split, slot = in_split >> p.parts_shift;
  if (in_split < 0) return make_int2(work_tile, 0);
  if (slot >= p.num_partials)
    return make_int2(work_tile - (p.num_partials << p.parts_shift) + p.num_partials, 0);
  return make_int2(p.first_split + slot, (in_split - (slot << p.parts_shift)) | (slot + 1)
                                                                                    << kPartialBit);
}

// The next work tile in order, with its first two segments, by a lane of the warp that clears rows,
// when all dq of the one before has been added: a work tile that is taken but not begun might be
// the one whose semaphore target that waits for. Work tiles may wait for those before them, so they
// are taken up in order, whichever CTA starts first, and by the order of the plan, which semaphore
// targets follow.
template <typename C>
__device__ __forceinline__ void publish_deterministic(const BwdKernelParams& p,
                                                      const BwdSmem<C>& smem,
                                                      PipelineState staged) {
  const int number = atomicAdd(p.workspace, 1);
  if (number >= p.num_work_tiles) return publish_none(smem, staged);
  const int2 of_pass = pass_of_number<C>(p, number);
  const int work_tile = of_pass.y;
  const magi_tile_plan_header& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  mbar_wait(smem.work_empty(staged.work_stage()), staged.work_phase() ^ 1);
  // Word by word, as there are few registers.
  const uint32_t at = smem.work_tile(staged.work_stage()),
                 semaphore = smem.work_semaphore(staged.work_stage());
  int order_idx, head;
  if (is_split_in_order<C>(p)) {
    const int2 whole = whole_deterministic(p, work_tile);
    work_tile_coords(p, whole.x, &order_idx, &head);
    sts_int(at + 4, head);
    sts_int(at + 12, traversal_word(p, order_idx) | whole.y);
    sts_int(semaphore,
            first_head<C>(p, at) | heads_of_work_tile<C>(p, whole.y)
                                       << 16);  // semaphore targets are found by the head
  } else {
    work_tile_coords(p, work_tile / p.splits_per_tile, &order_idx, &head);
    const int part = work_tile % p.splits_per_tile,
              in_l2_group = head - work_tile / p.work_tiles_per_l2_group * p.heads_per_l2_group;
    sts_int(semaphore, (p.order[0] & kLaterTargets && work_tile >= p.work_tiles_per_l2_group
                            ? p.work_tiles_per_l2_group
                            : 0) +
                           in_l2_group * p.splits_per_tile + part);
    sts_int(at + 4, head);
    sts_int(at + 12, traversal_word(p, order_idx) | BwdHeadSplit<C>{part, of_pass.x}.word());
  }
  const int tile = p.plan[plan.words_order + order_idx];
  sts_int(at, tile);
  if (!is_split_in_order<C>(p))
    sts_int(semaphore, lds_int(semaphore) + tile * p.work_tiles_per_tile);
  sts_int(at + 8, segments_of_tile(p.plan, tile).y);
  mbar_arrive(smem.work_full(staged.work_stage()));
#pragma unroll 1
  for (int segment = 0; segment < min(lds_int(at + 8), 2); ++segment, staged.next_segment())
    stage_segment(p, smem, staged, tile, segment);
}

}  // namespace magi
