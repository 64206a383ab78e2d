// SPDX-License-Identifier: Apache-2.0
// Clears rows of keys and queries that take part in nothing, in shared memory, by a warp of the
// producer warpgroup. With C::kSemaphored it also schedules work tiles, because the lane that does
// so elsewhere stores dq.
#pragma once

#include "device/tma.cuh"
#include "ffa/sm90/bwd/rows/completion.cuh"
#include "ffa/sm90/bwd/producer.cuh"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/smem.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/bwd/producer/work_tiles.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

// Zeroes a row of a tile of `rows` rows.
template <int kColumns>
__device__ __forceinline__ void zero_row(uint32_t tile, int rows, int row) {
#pragma unroll 1
  for (int chunk = 0; chunk < kColumns / 8; ++chunk)
    zero_chunk(tile + chunk / 8 * rows * 128 + row * 128 + chunk % 8 * 16);
}

// Whether any key of a tile sees the query in this segment. One that is in the full range of a
// warpgroup is found at once.
template <typename C>
__device__ __forceinline__ bool is_seen(uint32_t segment, int query) {
  for (int group = 0; group < C::kGroups; ++group) {
    const int2 full = lds_int2(segment + 32 + 16 * group + 8);
    if (query >= full.x && query < full.y) return true;
  }
#pragma unroll 1
  for (int key = 0; key < C::kBlockN; ++key) {
    const int2 queries = lds_int2(segment + C::kSegmentHeader + 8 * key);
    if (query >= queries.x && query < queries.y) return true;
  }
  return false;
}

// Bit j: whether row lane + 32 j of a tile has an interval in any of its segments.
template <typename C>
__device__ __forceinline__ uint32_t seen_rows(const int32_t* plan, int tile, int segments,
                                              int lane) {
  const magi_tile_plan_header& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  const int first = segments_of_tile(plan, tile).x;
  const int32_t* record =
      plan + header.words_records + first * header.segment_words + C::kSegmentHeader / 4 + 2 * lane;
  uint32_t seen = 0;
#pragma unroll 1
  for (; segments > 0 && seen != (1u << C::kBlockN / 32) - 1;
       --segments, record += C::kSegmentBytes / 4) {
#pragma unroll 1
    for (int j = 0; j < C::kBlockN / 32; ++j) {
      const int2 row = *reinterpret_cast<const int2*>(record + 64 * j);
      seen |= (row.x < row.y ? 1u : 0u) << j;
    }
  }
  return seen;
}

// One warp. Keys that no query sees and queries that see nothing may hold NaN or Inf, and zero
// times those is not zero: it clears the rows of such keys in every work tile and, in segments
// whose blocks may have such queries, all that no key of the tile sees. Not by lse: with sinks a
// query that sees nothing has one. It also tells when a listed work tile is through, as the warp
// with the least to do.
template <typename C>
__device__ void zero_masked_rows(const BwdKernelParams& p, const BwdSmem<C>& smem, int lane) {
  PipelineState state;
  Steps<C> steps;
  if (C::kWorkList && lane == 0) sts_int(smem.through(), -1);
  auto tell_before = [&] {
    if (!C::kWorkList || p.work_list == nullptr || lds_int(smem.through()) < 0) return;
    mbar_wait(smem.work_empty(state.work_stage() ^ 1), state.work_phase() ^ state.work_stage() ^ 1);
    if (lane == 0) tell_complete(p, smem.through());
  };
  while (true) {
    if constexpr (C::kSemaphored) {
      if (lane == 0) publish_deterministic(p, smem, state);
      __syncwarp();
    }
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    const uint32_t seen = seen_rows<C>(p.plan, work_tile.x, work_tile.z, lane);
    mbar_wait(smem.kv_raw(), state.kv_phase());
    if (work_tile.z > 0) {
#pragma unroll 1
      for (int j = 0; j < C::kBlockN / 32; ++j) {
        if (seen >> j & 1) continue;
        zero_row<C::kD>(smem.k(), C::kBlockN, lane + 32 * j);
        zero_row<C::kDv>(smem.v(), C::kBlockN, lane + 32 * j);
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.kv_full());
    tell_before();
    if (C::kWorkList && lane == 0)
      sts_int(smem.through(), splits_of_work_tile(p, work_tile.x, work_tile.y, work_tile.w));
    const bool clears = has_unseen(p);
    auto heads = [&] { return heads_of_work_tile<C>(p, work_tile.w); };
#pragma unroll 1
    for (int left = work_tile.z * (walks_by_head<C>(work_tile.z) ? heads() : 1); left > 0; --left) {
      mbar_wait(smem.segment_full(state.segment_stage()), state.segment_phase());
      const int2 range =
          blocks_of_work_tile<C>(smem, smem.segment(state.segment_stage()), state.work_stage());
      const int blocks = range.y - range.x;
#pragma unroll 1
      for (int i = clears ? (walks_by_head<C>(work_tile.z) ? 1 : heads()) * blocks : 0; i > 0;
           --i) {
        const Ring<C::kStages> ring = steps.now();
        mbar_wait(smem.q_raw(ring.stage),
                  ring.phase);  // and what the step is was said before that was asked for
        // Rows of most segments may all be handed over as they are.
        const bool is_clean = lds_int(smem.segment(state.segment_stage()) +
                                      offsetof(magi_tile_segment, has_unseen)) == 0;
#pragma unroll 1
        for (int row = is_clean ? C::kBlockM : lane; row < C::kBlockM; row += 32) {
          const int query = lds_int(smem.step(ring.stage) + 4) + row;
          if (is_seen<C>(smem.segment(state.segment_stage()), query)) continue;
          zero_row<C::kD>(smem.q(ring.stage), C::kBlockM, row);
          zero_row<C::kDv>(smem.dout(ring.stage), C::kBlockM, row);
          sts_int(smem.stats(ring.stage) + C::stat_at(row), __float_as_int(INFINITY));
          sts_int(smem.stats(ring.stage) + C::kDeltasAt + C::stat_at(row), 0);
        }
        fence_async_proxy();
        mbar_arrive(smem.q_full(ring.stage));
        mbar_arrive(smem.do_full(ring.stage));
        steps.advance();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.segment_empty(state.segment_stage()));
      state.next_segment();
      if constexpr (C::kSemaphored) {
        // Two further on: into the place of this one, when all have left it.
        if (lane == 0 && left > 2) {
          PipelineState staged = state;
          staged.next_segment();
          const int4 again = lds_int4(smem.work_tile(state.work_stage()));  // rather than kept
          stage_segment(p, smem, staged, again.x, again.z - left + 2);
        }
        __syncwarp();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
    if constexpr (C::kSemaphored)
      if (lane == 0)
        mbar_wait(
            smem.issued(),
            state.work_stage() ^ 1);  // a phase for each work tile, and this one has been counted
  }
  tell_before();
  if constexpr (C::kSemaphored)
    if (lane == 0) leave_work_tiles(p);
}

}  // namespace magi
