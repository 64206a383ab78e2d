// SPDX-License-Identifier: Apache-2.0
// The producer of the backward kernel: a lane of warpgroup 0 that describes each step and copies
// its Q and dO; and the copies of K and V. Other lanes of the warpgroup schedule work tiles
// (bwd/producer/work_tiles.cuh), store dq (bwd/producer/dq_store.cuh) and clear rows
// (bwd/producer/row_guard.cuh).
#pragma once

#include <type_traits>

#include "device/tma.cuh"
#include "ffa/sm90/bwd/rows/completion.cuh"
#include "ffa/sm90/bwd/schedule/plan_reader.cuh"
#include "ffa/sm90/bwd/smem.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

// Whether a warpgroup needs a mask for a block: not all its keys see all of it.
template <typename C>
__device__ __forceinline__ int needs_mask(uint32_t segment, int group, int block) {
  const int2 full = lds_int2(segment + 32 + 16 * group + 8);
  return block * C::kBlockM < full.x || (block + 1) * C::kBlockM > full.y ? kMasked : 0;
}

// A tile of `rows` rows from the first on, in column tiles of 64.
template <int kColumns>
__device__ __forceinline__ void load_rows(uint32_t to, int rows, const CUtensorMap* map,
                                          uint32_t bar, int first, int head, uint64_t policy) {
#pragma unroll
  for (int d = 0; d < (kColumns + 63) / 64; ++d)
    load_tile_3d(to + d * rows * 128, map, bar, d * 64, first, head, policy);
}

// For a work tile. Read again and again rather than kept: the feeding lanes have few registers.
template <typename C>
__device__ __forceinline__ int first_head(const BwdKernelParams& p, uint32_t work_tile) {
  return lds_int(work_tile + 4) * p.group + first_head_of_work_tile<C>(p, lds_int(work_tile + 12));
}

// Copies dO of a step. The barrier it arrives at is that of Q as well where rows are cleared before
// they are handed over.
template <typename C>
__device__ __forceinline__ void copy_dout(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                          const Ring<C::kStages>& ring) {
  mbar_wait(smem.do_empty(ring.stage), ring.phase ^ 1);
  const bool clears = has_unseen(p);
  const uint32_t bar = clears ? smem.q_raw(ring.stage) : smem.do_full(ring.stage);
  if (!clears) mbar_expect(bar, C::kDoBytes);
  const int4 step = lds_int4(smem.step(ring.stage));
  const int head =
      C::kDirectStore ? (step.w & kDirectStoreBit - 1) >> kStepHeadBit : step.w >> kStepHeadBit;
  load_rows<C::kDv>(smem.dout(ring.stage), C::kBlockM, &p.do_map, bar, step.y, head, kEvictLast);
}

// Until the rows of a block are prepared, for the heads of the work tile; where work tiles are
// listed.
template <typename C>
__device__ __forceinline__ void wait_until_prepared(const BwdKernelParams& p,
                                                    const BwdSmem<C>& smem, int block,
                                                    uint32_t work_tile) {
  if (lds_int(smem.prepared())) return;
  while (load_acquire(p.completion.prepared + block * p.heads_kv + lds_int(work_tile + 4)) <
         p.group) {
  }
  fence_proxies();
  if (load_acquire(p.workspace + kPreparedWord) == p.prepare_groups) sts_int(smem.prepared(), 1);
}

// Where a lane is among the steps, in one register: its place in the ring of stages and, with
// semaphores, in dq_queue.
template <typename C>
struct StepRing {
  Ring<C::kStages> ring;
  __device__ __forceinline__ Ring<C::kStages> now() const { return ring; }
  __device__ __forceinline__ void advance() { ring.advance(); }
};
template <typename C>
struct TwoRings {
  uint32_t place = 0;
  __device__ __forceinline__ Ring<C::kStages> now() const {
    return {place % C::kStages, C::kStages == 2 ? place >> 1 : place};
  }
  __device__ __forceinline__ void advance() { place = (place + 1) % C::kDqQueueStages; }
};
template <typename C>
using Steps = std::conditional_t<C::kSemaphored, TwoRings<C>, StepRing<C>>;

// One lane. Says what each step is, and copies its Q, stats and dO.
template <typename C>
__device__ void copy_queries(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
  Steps<C> steps;
  if constexpr (C::kWorkList) sts_int(smem.prepared(), 0);
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
#pragma unroll 1
    for (sts_int(smem.left(), first_visit<C>(work_tile.z)); visits_left(lds_int(smem.left())) > 0;
         sts_int(smem.left(), lds_int(smem.left()) - 1)) {
      mbar_wait(smem.segment_full(state.segment_stage()), state.segment_phase());
      const bool one_head_at_a_time =
          !C::kSemaphored && (walked_head(lds_int(smem.left())) >= 0 ||
                              is_band(lds_int4(smem.segment(state.segment_stage()) + 32)));
      auto by_head = [&] {
        return C::kSemaphored
                   ? (lds_int(smem.work_tile(state.work_stage()) + 12) >> kByHeadBit & 1) != 0
                   : one_head_at_a_time;
      };
      auto heads = [&] {
        if (is_split_in_order<C>(p)) return lds_int(smem.work_semaphore(state.work_stage())) >> 16;
        return C::kSplit || !C::kSemaphored
                   ? heads_of_work_tile<C>(p, lds_int(smem.work_tile(state.work_stage()) + 12))
                   : p.heads_per_split;
      };
      // Where the tile is walked once for each head, that of this time.
      auto walked = [&] { return C::kSemaphored ? -1 : walked_head(lds_int(smem.left())); };
      auto end = [&] { return walked() >= 0 ? walked() + 1 : heads(); };
      int i = max(walked(), 0);
      do {
        auto blocks = [&] {
          return blocks_of_work_tile<C>(smem, smem.segment(state.segment_stage()),
                                        state.work_stage());
        };
        auto word = [&] { return lds_int(smem.work_tile(state.work_stage()) + 12); };
        auto traversal = [&] { return Traversal(word() >> kTraversalBit & 3); };
        auto step = [&](MBlockIter& order) {
          if constexpr (C::kSemaphored)
            order.step(blocks, [&] { return traversal() == Traversal::kDescending; });
          else
            order.step(blocks);
        };
        MBlockIter order =
            !C::kSemaphored ? MBlockIter(blocks(), word() >> kDescendingBit & MAGI_TRAVERSAL_WRAP)
                            : MBlockIter(blocks(), traversal(),
                                         is_split_in_order<C>(p) ? 0 : word() >> kShiftBit);
#pragma unroll 1
        for (; order.left() > 0; step(order)) {
          if constexpr (C::kDirectStore)
            sts_int(smem.direct(), p.direct_dq_store == nullptr
                                       ? 0
                                       : load_relaxed(p.direct_dq_store + order.block));
          do {
            const Ring<C::kStages> ring = steps.now();
            mbar_wait(smem.q_empty(ring.stage), ring.phase ^ 1);
            if constexpr (C::kWorkList)
              if ((i == 0 || one_head_at_a_time) && p.work_list != nullptr)
                wait_until_prepared(p, smem, order.block, smem.work_tile(state.work_stage()));
            int head = i;
            if (is_split_in_order<C>(p))
              head += lds_int(smem.work_semaphore(state.work_stage())) & 0xffff;
            else
              head += first_head<C>(p, smem.work_tile(state.work_stage()));
            const uint32_t number =
                head * p.num_m_blocks + order.block;  // 32 bits do: it stands for 64 tokens
            int what = state.segment_stage() << kSegmentStageBit | head << kStepHeadBit;
            if (order.left() == 1 && i + 1 == end())
              what |= visits_left(lds_int(smem.left())) == 1 && i + 1 == heads()
                          ? kSegmentEnds | kWorkTileEnds
                          : kSegmentEnds;
            auto word_of = [&](int group) {
              return what | needs_mask<C>(smem.segment(state.segment_stage()), group, order.block);
            };
            if constexpr (!C::kDirectStore) {
              sts_int4(smem.step(ring.stage), number, order.block * C::kBlockM, word_of(0),
                       word_of(1));
            } else {
              // Word by word, and this late, as there are few registers.
              sts_int2(smem.step(ring.stage), number, order.block * C::kBlockM);
              what |= lds_int(smem.direct());
              sts_int(smem.step(ring.stage) + 8, word_of(0));
              sts_int(smem.step(ring.stage) + 12, word_of(1));
            }
            if constexpr (C::kSemaphored) {
              const uint32_t place = C::kStages == 2
                                         ? 2 * ring.phase + ring.stage
                                         : steps.place;  // without a register of its own
              uint32_t dq_queue = number | static_cast<uint32_t>(what & kWorkTileEnds) << 29;
              if constexpr (C::kDirectStore)
                dq_queue |= static_cast<uint32_t>(what & kDirectStoreBit) << 11;
              sts_int(smem.dq_queue(place), dq_queue);
              mbar_arrive(smem.step_full(place));
            }
            const uint32_t bar = has_unseen(p) ? smem.q_raw(ring.stage) : smem.q_full(ring.stage);
            mbar_expect(bar, C::kQBytes + C::kStatBytes +
                                 (bar == smem.q_raw(ring.stage) ? C::kDoBytes : 0));
            load_bytes(smem.stats(ring.stage),
                       p.stats + static_cast<uint64_t>(number) * stat_floats(C::kBlockM),
                       C::kStatBytes, bar);
            load_rows<C::kD>(smem.q(ring.stage), C::kBlockM, &p.q_map, bar,
                             order.block * C::kBlockM, head, kEvictLast);
            copy_dout<C>(p, smem, ring);
            steps.advance();
          } while (!by_head() && ++i < heads());
          if (!by_head()) i = 0;
        }
      } while (by_head() && ++i < end());
      mbar_arrive(smem.segment_empty(state.segment_stage()));
      state.next_segment();
      if (visits_left(lds_int(smem.left())) == 1 && walked() >= 0 && end() < heads())
        sts_int(smem.left(),
                next_walk(lds_int(smem.left()), lds_int(smem.work_tile(state.work_stage()) + 8)));
    }
    if constexpr (!C::kSemaphored) mbar_arrive(smem.issued());
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
}

// Rows of K and V, from row `first` of these maps on.
template <typename C>
__device__ __forceinline__ void load_key_rows(const BwdSmem<C>& smem, const CUtensorMap* k_map,
                                              const CUtensorMap* v_map, int first, int head) {
  load_rows<C::kD>(smem.k(), C::kBlockN, k_map, smem.kv_raw(), first, head, kEvictFirst);
  load_rows<C::kDv>(smem.v(), C::kBlockN, v_map, smem.kv_raw(), first, head, kEvictFirst);
}

// K and V of a work tile, which has keys to look at.
template <typename C>
__device__ __forceinline__ void load_keys(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                          uint32_t work_tile_at) {
  const int2 work_tile = lds_int2(work_tile_at);  // its tile and its head
  mbar_expect(smem.kv_raw(), C::kKBytes + C::kVBytes);
  if (work_tile.x * C::kBlockN < p.remote.base) {
    load_key_rows(smem, &p.k_map, &p.v_map, work_tile.x * C::kBlockN, work_tile.y);
  } else {
    wait_for_tile(p.remote, work_tile.x - p.remote.base / kRemoteTile);
    const int tile = lds_int(work_tile_at);
    const int head = lds_int(work_tile_at + 4);
    load_key_rows(smem, &p.remote.k_map, &p.remote.v_map, tile * C::kBlockN - p.remote.base, head);
  }
}

}  // namespace magi
