// SPDX-License-Identifier: Apache-2.0
// The producer of the key-stationary backward: a lane that takes work tiles, one that copies Q, dO
// and the statistics of each step, one that copies K and V, and a warp that clears keys which no
// query sees.
#pragma once

#include "ffa/sm90/bwd/producer/row_guard.cuh"
#include "ffa/sm90/index/bwd/keys/params.h"

namespace magi {

// The fourth word of a work tile.
struct TilePart {
  int word;
  __device__ int first_head() const { return word & 0xff; }  // of the group
  __device__ int heads() const { return word >> 8 & 0xff; }
  __device__ int granules() const { return word >> 16 & 0xff; }  // that any query block sees
};

// What a warpgroup needs to know of a step: flags as in bwd/smem.cuh, and from this bit on its
// granules.
constexpr int kGranuleBit = kStepHeadBit;
constexpr int kAllGranules = (1 << kGranulesOfWarpgroup) - 1;

__device__ __forceinline__ int granule_word(int group, int granules, int keys) {
  const int mine = granules >> group * kGranulesOfWarpgroup & kAllGranules;
  const bool is_whole = mine == kAllGranules && keys >= (group + 1) * (kTileBlockN / 2);
  return mine << kGranuleBit | (is_whole ? 0 : kMasked);
}

// One lane. The next work tile is taken as late as possible, when all copies of the one before
// have been issued. Parts of a tile wait for those before them, so a CTA that has not begun must
// hold none: all are taken from the counter.
template <typename C>
__device__ void schedule_tiles(const IndexKeysParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
#pragma unroll 1
  for (int i = atomicAdd(p.workspace, 1); i < *p.order_of_tiles.count;
       i = atomicAdd(p.workspace, 1)) {
    mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
    const int2 work_tile = p.order_of_tiles.work_tiles[i];
    const int head = work_tile.x / p.lists.num_tiles;
    sts_int4(smem.work_tile(state.work_stage()), work_tile.x - head * p.lists.num_tiles, head,
             p.lists.tiles[work_tile.x].x, work_tile.y);
    mbar_arrive(smem.work_full(state.work_stage()));
    state.next_work();
    mbar_wait(smem.issued(), state.work_stage() ^ 1);  // a phase for each work tile
  }
  publish_none(smem, state);
}

// Copies a step: 64 queries of a head.
template <typename C>
__device__ __forceinline__ void copy_step(const IndexKeysParams& p, const BwdSmem<C>& smem,
                                          const Ring<C::kStages>& ring, int head, int block) {
  const uint32_t number = head * p.num_m_blocks + block;
  mbar_expect(smem.q_full(ring.stage), C::kQBytes + C::kStatBytes);
  load_bytes(smem.stats(ring.stage),
             p.stats + static_cast<uint64_t>(number) * stat_floats(C::kBlockM), C::kStatBytes,
             smem.q_full(ring.stage));
  load_rows<C::kD>(smem.q(ring.stage), C::kBlockM, &p.q_map, smem.q_full(ring.stage),
                   block * C::kBlockM, head, kEvictLast);
  mbar_wait(smem.do_empty(ring.stage), ring.phase ^ 1);
  mbar_expect(smem.do_full(ring.stage), C::kDoBytes);
  load_rows<C::kDv>(smem.dout(ring.stage), C::kBlockM, &p.do_map, smem.do_full(ring.stage),
                    block * C::kBlockM, head, kEvictLast);
}

// The entry at a place of the list of the work tile at `at`.
__device__ __forceinline__ int entry_of_list(const IndexKeysParams& p, uint32_t at, int place) {
  const int2 tile = lds_int2(at);  // and its head
  return __ldg(p.lists.entries +
               (static_cast<int64_t>(tile.y) * p.lists.num_tiles + tile.x) * p.lists.num_lists +
               place);
}

// One lane. Walks the list of each work tile once for each of its heads, so that what CTAs share in
// L2 at a time is of few heads. The lane has few registers: words of the work tile are read again
// and again, heads left are in `left`, and the next place of the list is in `through`.
template <typename C>
__device__ void copy_listed_queries(const IndexKeysParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
  Ring<C::kStages> ring;
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const uint32_t at = smem.work_tile(state.work_stage());
    if (lds_int(at) < 0) break;
    sts_int(smem.left(), lds_int(at + 8) > 0 ? TilePart{lds_int(at + 12)}.heads() : 0);
#pragma unroll 1
    for (; lds_int(smem.left()) > 0; sts_int(smem.left(), lds_int(smem.left()) - 1)) {
      int next = entry_of_list(p, at, 0);
#pragma unroll 1
      for (sts_int(smem.through(), 1); lds_int(smem.through()) <= lds_int(at + 8);
           sts_int(smem.through(), lds_int(smem.through()) + 1)) {
        const int entry = next;
        if (lds_int(smem.through()) < lds_int(at + 8))
          next = entry_of_list(p, at, lds_int(smem.through()));
        int block = (entry >> kGranules) * p.lists.blocks_per_list;
        int blocks_left = min(p.lists.blocks_per_list, p.num_m_blocks - block);
#pragma unroll 1
        for (; blocks_left > 0; --blocks_left, ++block) {
          mbar_wait(smem.q_empty(ring.stage), ring.phase ^ 1);
          const TilePart part{lds_int(at + 12)};
          const int heads_left = lds_int(smem.left());
          const int head =
              lds_int(at + 4) * p.group + part.first_head() + part.heads() - heads_left;
          const int keys = p.total_k - lds_int(at) * C::kBlockN;  // from the tile's first on
          const bool is_last =
              blocks_left == 1 && heads_left == 1 && lds_int(smem.through()) == lds_int(at + 8);
          const int ends = is_last ? kWorkTileEnds : 0;
          sts_int4(smem.step(ring.stage), head * p.num_m_blocks + block, keys,
                   ends | granule_word(0, entry, keys), ends | granule_word(1, entry, keys));
          copy_step<C>(p, smem, ring, head, block);
          ring.advance();
        }
      }
    }
    mbar_arrive(smem.issued());
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
}

// One lane. Copies K and V of each work tile.
template <typename C>
__device__ void copy_keys(const IndexKeysParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    mbar_wait(smem.kv_empty(), state.kv_phase() ^ 1);
    if (work_tile.z == 0) {
      mbar_arrive(smem.kv_raw());  // nothing to load, but dk and dv are staged there
    } else {
      mbar_expect(smem.kv_raw(), C::kKBytes + C::kVBytes);
      load_key_rows(smem, &p.k_map, &p.v_map, work_tile.x * C::kBlockN, work_tile.y);
    }
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
}

// One warp. Keys that no query sees may hold NaN or Inf, and zero times those is not zero. Queries
// need no such care: blocks of them that see nothing are in no list.
template <typename C>
__device__ void clear_unseen_keys(const BwdSmem<C>& smem, int lane) {
  PipelineState state;
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    mbar_wait(smem.kv_raw(), state.kv_phase());
#pragma unroll 1
    for (int row = work_tile.z > 0 ? lane : C::kBlockN; row < C::kBlockN; row += 32) {
      if (TilePart{work_tile.w}.granules() >> row / kGranule & 1) continue;
      zero_row<C::kD>(smem.k(), C::kBlockN, row);
      zero_row<C::kDv>(smem.v(), C::kBlockN, row);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      mbar_arrive(smem.kv_full());
      mbar_arrive(smem.work_empty(state.work_stage()));
    }
    state.next_work();
  }
}

}  // namespace magi
