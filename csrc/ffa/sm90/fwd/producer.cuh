// SPDX-License-Identifier: Apache-2.0
// The producer of the forward kernel: its shared memory, and the three parts of warpgroup 0, which
// schedule work tiles, copy tiles and clear V rows that no query sees.
#pragma once

#include <cstddef>

#include "magi/abi.h"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/fwd/config.h"
#include "ffa/sm90/fwd/params.h"
#include "ffa/sm90/fwd/combine.cuh"
#include "ffa/sm90/tile_scheduler.cuh"

namespace magi {

template <typename C>
struct FwdSmem {
  uint32_t base;  // shared-space address of the 1024-aligned start
  uint32_t segment_bytes;

  __device__ FwdSmem(uint32_t start, int tile_tokens) : base(start) {
    segment_bytes = fwd_segment_bytes(tile_tokens);
  }
  __device__ uint32_t q(uint32_t slot) const { return base + C::kQAt + slot * C::kQBytes; }
  __device__ uint32_t k(uint32_t slot) const { return base + C::kKAt + slot * C::kKBytes; }
  __device__ uint32_t v(uint32_t slot) const { return base + C::kVAt + slot * C::kVBytes; }
  __device__ uint32_t out(int group, uint32_t q_stage) const {
    return q(q_stage) + group * (64 * 128);  // its own rows of Q, in every column tile
  }
  __device__ uint32_t segment(uint32_t slot) const {
    return base + C::kSegmentsAt + slot * segment_bytes;
  }
  __device__ uint32_t bar(int i) const { return base + C::kBarriersAt + 8 * i; }
  __device__ uint32_t q_full(uint32_t s) const { return bar(0 + s); }
  __device__ uint32_t q_empty(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t work_full(uint32_t s) const { return bar(8 + s); }
  __device__ uint32_t work_empty(uint32_t s) const { return bar(10 + s); }
  __device__ uint32_t segment_full(uint32_t s) const { return bar(12 + s); }
  __device__ uint32_t segment_empty(uint32_t s) const { return bar(14 + s); }
  __device__ uint32_t v_full(uint32_t s) const { return bar(16 + s); }
  __device__ uint32_t v_empty(uint32_t s) const { return bar(19 + s); }
  __device__ uint32_t v_raw(uint32_t s) const {
    return bar(22 + s);
  }  // arrived, but with rows to be cleared
  __device__ uint32_t issued() const { return bar(25); }  // nearly all copies of a work tile are
  // A work tile as four words: tile (-1: no more work), head unit, number of segments,
  // Part::word.
  __device__ uint32_t work_tile(uint32_t s) const { return bar(26) + 16 * s; }

  __device__ void init_barriers() const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(q_full(s), 1);
      mbar_init(q_empty(s), C::kGroups);
      mbar_init(k_full(s), 1);
      mbar_init(k_empty(s), C::kConsumerWarps);
      mbar_init(work_full(s), 1);
      mbar_init(work_empty(s), C::kWorkReaders);
      mbar_init(segment_full(s), 1);
      mbar_init(segment_empty(s), C::kConsumerWarps + 2);
    }
    for (uint32_t s = 0; s < C::kVStages; ++s) {
      mbar_init(v_full(s), 1);
      mbar_init(v_raw(s), 1);
      mbar_init(v_empty(s), C::kConsumerWarps);
    }
    mbar_init(issued(), 1);
    mbar_init_fence();
  }
};

// Where a role is in the rings of K and V, which have two stages each, in one register.
struct KvRing {
  uint32_t blocks = 0;  // so far

  __device__ __forceinline__ uint32_t stage() const { return blocks & 1; }
  __device__ __forceinline__ uint32_t phase() const { return blocks >> 1 & 1; }
  __device__ __forceinline__ void advance() { ++blocks; }
};

// One lane, see tile_scheduler.cuh. With keys of other ranks it also says when this CTA needs no
// more of them.
template <typename C>
__device__ void schedule_fwd(const FwdKernelParams& p, const FwdSmem<C>& smem) {
  const int extra = C::kPlain ? 0 : p.split_tiles * (p.max_parts - 1);
  PipelineState state = schedule_work_tiles(
      p, smem, (p.num_tiles + extra) * p.head_units,
      [&](int work_tile, int* order_idx, int* head_unit, int* part) {
        if constexpr (C::kPlain)
          work_tile_coords(p, work_tile, order_idx, head_unit);
        else
          split_work_coords(p, work_tile, order_idx, head_unit, part);
      },
      [&](int tile_at, int order_idx, int index) {
        Part part{index, 1};
        if (!C::kPlain) {
          const int blocks = p.plan[tile_at + offsetof(magi_tile_desc, num_blocks) / 4];
          part.count = parts_of(p, order_idx, blocks);
        }
        return part.index < part.count ? part.placed_word(part.count > 1 ? order_idx : 0) : kNoPart;
      });
  if (p.remote.buffer.of_rank == nullptr) return;
  // As before a work tile in the place of the last one: when that is over.
  state.next_work();
  mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
  end_peer_kv(p.remote, p.workspace + 2);
}

// Key blocks of a work tile that are still to be copied when the next one is taken. With the two in
// the rings they last longer than the look-ups.
constexpr int kBlocksAfterIssued = 4;

// One lane. Copies Q, K and V tiles.
template <typename C>
__device__ void copy_tiles(const FwdKernelParams& p, const FwdSmem<C>& smem) {
  static_assert(C::kVStages == 2, "V is walked by the ring of K");
  PipelineState state;
  KvRing kv;
  int arrived = 0;  // stages of remote keys
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    // Two Q stages alternate with the work tiles; a single one changes its phase with each.
    const uint32_t q_stage = C::kQStages == 1 ? 0 : state.work_stage(),
                   q_phase = C::kQStages == 1 ? state.kv_phase() : state.work_phase();
    const int kv_head = work_tile.y / p.kv_head_of_head_unit;
    mbar_wait(smem.q_empty(q_stage), q_phase ^ 1);
    if (work_tile.z == 0) {  // nothing to load, but the output is staged in this stage
      mbar_arrive(smem.q_full(q_stage));
    } else {
      mbar_expect(smem.q_full(q_stage), C::kQBytes);
#pragma unroll
      for (int d = 0; d < C::kAtoms; ++d)
        load_tile_4d(smem.q(q_stage) + d * C::kBlockM * 128, &p.q_map, smem.q_full(q_stage), d * 64,
                     0, work_tile.x * p.tile_tokens, work_tile.y, kEvictFirst);
    }
    bool issued = false;
    for (int left = work_tile.z; left > 0; --left) {
      mbar_wait(smem.segment_full(state.segment_stage()), state.segment_phase());
      const Part part = Part::of_placed_word(
          lds_int(smem.work_tile(state.work_stage()) + 12));  // not kept in registers
      const int2 visit = part.template piece<C>(lds_int2(smem.segment(state.segment_stage())));
      const bool clears = lds_int(smem.segment(state.segment_stage()) + 16) != 0;
      mbar_arrive(smem.segment_empty(state.segment_stage()));
      state.next_segment();
      // Blocks are laid from the right end: a causal diagonal then lies in the first one.
      for (int k1 = visit.y; k1 > visit.x; k1 -= C::kBlockN) {
        if (left == 1 && !issued && k1 - visit.x <= kBlocksAfterIssued * C::kBlockN) {
          mbar_arrive(smem.issued());
          issued = true;
        }
        // A block has local or remote keys: between them are 128 that nobody sees. Rows outside a
        // tensor arrive as zeros.
        const bool is_remote = k1 > p.remote.base;
        const int k0 = k1 - C::kBlockN - (is_remote ? p.remote.base : 0);  // may be negative
        if (is_remote) {
          if (k0 >= 0) wait_for_tile(p.remote, k0 / kRemoteTile, arrived);
          wait_for_tile(p.remote, (k0 + C::kBlockN - 1) / kRemoteTile, arrived);
        }
        mbar_wait(smem.k_empty(kv.stage()), kv.phase() ^ 1);
        mbar_expect(smem.k_full(kv.stage()), C::kKBytes);
#pragma unroll
        for (int d = 0; d < C::kAtoms; ++d)
          load_tile_3d(smem.k(kv.stage()) + d * C::kBlockN * 128,
                       is_remote ? &p.remote.k_map : &p.k_maps[C::kKvMaps], smem.k_full(kv.stage()),
                       d * 64, k0, kv_head, kEvictLast);
        mbar_wait(smem.v_empty(kv.stage()), kv.phase() ^ 1);
        const uint32_t arrival = clears ? smem.v_raw(kv.stage()) : smem.v_full(kv.stage());
        mbar_expect(arrival, C::kVBytes);
#pragma unroll
        for (int d = 0; d < C::kAtomsV; ++d)
          load_tile_3d(smem.v(kv.stage()) + d * C::kBlockN * 128,
                       is_remote ? &p.remote.v_map : &p.v_maps[C::kKvMaps], arrival, d * 64, k0,
                       kv_head, kEvictLast);
        kv.advance();
      }
    }
    if (!issued) mbar_arrive(smem.issued());
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
}

// One warp. Where a segment may touch keys that no query sees, zeroes the V rows that no token of
// the tile sees in this segment: their weight is zero, but zero times the NaN or Inf that such rows
// may hold is not.
template <typename C>
__device__ void zero_masked_rows(const FwdKernelParams& p, const FwdSmem<C>& smem, int lane) {
  PipelineState state;
  KvRing kv;
  uint32_t raw_phases = 0;  // v_raw moves only where it is used, so each stage keeps its own phase
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    for (int left = work_tile.z; left > 0; --left) {
      mbar_wait(smem.segment_full(state.segment_stage()), state.segment_phase());
      const uint32_t at = smem.segment(state.segment_stage());
      const Part part = Part::of_placed_word(lds_int(smem.work_tile(state.work_stage()) + 12));
      const int2 visit = part.template piece<C>(lds_int2(at));
      const bool clears = lds_int(at + 16) != 0;
      for (int k1 = visit.y; k1 > visit.x; k1 -= C::kBlockN) {
        if (clears) {
          mbar_wait(smem.v_raw(kv.stage()), raw_phases >> kv.stage() & 1);
          raw_phases ^= 1u << kv.stage();
#pragma unroll 1
          for (int row = lane; row < C::kBlockN; row += 32) {
            const int key = k1 - C::kBlockN + row;
            bool seen = false;
#pragma unroll 1
            for (int t = 0; t < p.tile_tokens && !seen; ++t) {
              const int2 keys = lds_int2(at + kSegmentHeader + 8 * t);
              seen = key >= keys.x && key < keys.y;
            }
#pragma unroll 1
            for (int chunk = 0; chunk < C::kDv / 8 && !seen; ++chunk)
              zero_chunk(smem.v(kv.stage()) + chunk / 8 * (C::kBlockN * 128) + row * 128 +
                         chunk % 8 * 16);
          }
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) mbar_arrive(smem.v_full(kv.stage()));
        }
        kv.advance();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.segment_empty(state.segment_stage()));
      state.next_segment();
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
}

}  // namespace magi
