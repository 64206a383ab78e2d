// SPDX-License-Identifier: Apache-2.0
// The producer of the forward of block lists: a lane that takes work tiles, and one that copies
// Q and the listed blocks of K and V.
#pragma once

#include "ffa/sm90/fwd/producer.cuh"
#include "ffa/sm90/index/fwd/blocks/config.h"
#include "ffa/sm90/index/fwd/blocks/params.h"

namespace magi {

// One lane. Kv heads go one after the other, so that their keys stay in L2, and the tiles of a
// list, too. A work tile is taken when few copies of the one before are left, so that the last ones
// go to the CTAs that are free first. The words of a work tile are the tile, the kv head, the steps
// of its list, and the keys of the last of these.
template <typename C>
__device__ void schedule_lists(const IndexBlocksParams& p, const FwdSmem<C>& smem) {
  PipelineState state;
  const int total = p.num_lists * p.heads_kv * p.tiles_of_list;
#pragma unroll 1
  for (int i = blockIdx.x; i < total; i = atomicAdd(p.workspace, 1) + gridDim.x) {
    const int place = i / p.tiles_of_list, kv_head = place / p.num_lists;
    const int list_of_head = __ldg(p.order + place);
    const int tile = list_of_head * p.tiles_of_list + i - place * p.tiles_of_list;
    if (tile >= p.num_tiles) continue;  // the last list is shorter
    const int64_t list = list_number(p, list_of_head, kv_head);
    const int count = __ldg(p.counts + list);
    int64_t keys = 0;
    if (count > 0) {
      const int64_t last = __ldg(p.lists + list * p.max_entries + count - 1);
      const int64_t beyond = (last + 1) * p.k_block - p.total_k;
      keys = static_cast<int64_t>(count) * p.k_block - (beyond > 0 ? beyond : 0);
    }
    const int steps = static_cast<int>((keys + C::kBlockN - 1) / C::kBlockN);
    mbar_wait(smem.work_empty(state.work_stage()), state.work_phase() ^ 1);
    sts_int4(smem.work_tile(state.work_stage()), tile, kv_head, steps,
             static_cast<int>(keys - static_cast<int64_t>(steps - 1) * C::kBlockN));
    mbar_arrive(smem.work_full(state.work_stage()));
    state.next_work();
    mbar_wait(smem.issued(), state.work_stage() ^ 1);  // a phase for each work tile
  }
  publish_none(smem, state);
}

// A place in a list, which moves by the keys of one copy. An entry is asked for one block before it
// is needed.
struct ListedKeys {
  const int32_t *next, *end;
  int entry, after;
  int in_block = 0;

  __device__ ListedKeys(const IndexBlocksParams& p, int64_t list)
      : next(p.lists + list * p.max_entries), end(next + p.max_entries) {
    entry = load();
    after = load();
  }
  __device__ __forceinline__ int load() { return next < end ? __ldg(next++) : 0; }
  __device__ __forceinline__ int key(const IndexBlocksParams& p) const {
    return entry * p.k_block + in_block;
  }
  __device__ __forceinline__ void advance(const IndexBlocksParams& p) {
    in_block += p.box_rows;
    if (in_block < p.k_block) return;
    in_block = 0;
    entry = after;
    after = load();
  }
};

// Copies the keys of a step from `keys` on, of which the list names `present`. The rows behind them
// are asked for behind the end of the tensor, from where zeros arrive: their weight is zero, but
// zero times what the stage held before may not be.
template <typename C>
__device__ __forceinline__ ListedKeys copy_step(const IndexBlocksParams& p, const CUtensorMap* map,
                                                uint32_t to, uint32_t bar, int kv_head,
                                                ListedKeys keys, int present) {
  static_assert(C::kD == C::kDv, "one way to copy both");
#pragma unroll 1
  for (int row = 0; row < C::kBlockN; row += p.box_rows) {
    const int key = row < present ? keys.key(p) : p.total_k;
#pragma unroll
    for (int d = 0; d < C::kD / 64; ++d)
      load_tile_3d(to + (d * C::kBlockN + row) * 128, map, bar, d * 64, key, kv_head, kEvictLast);
    keys.advance(p);
  }
  return keys;
}

// One lane.
template <typename C>
__device__ void copy_lists(const IndexBlocksParams& p, const FwdSmem<C>& smem) {
  static_assert(C::kQStages == 2, "stages of Q alternate with the work tiles");
  Ring<2> work_tiles;
  Ring<C::kKStages> ks;
  Ring<C::kVStages> vs;
  while (true) {
    mbar_wait(smem.work_full(work_tiles.stage), work_tiles.phase);
    const int4 work_tile = lds_int4(smem.work_tile(work_tiles.stage));
    if (work_tile.x < 0) break;
    const int kv_head = work_tile.y;
    ListedKeys keys(p, list_number(p, work_tile.x / p.tiles_of_list, kv_head));
    const uint32_t q_full = smem.q_full(work_tiles.stage);
    mbar_wait(smem.q_empty(work_tiles.stage), work_tiles.phase ^ 1);
    if (work_tile.z == 0) {  // nothing to load, but the output is staged in this stage
      mbar_arrive(q_full);
      mbar_arrive(smem.issued());
    } else {
      mbar_expect(q_full, C::kQBytes);
#pragma unroll
      for (int d = 0; d < C::kD / 64; ++d)
        load_tile_4d(smem.q(work_tiles.stage) + d * C::kBlockM * 128, &p.q_map, q_full, d * 64, 0,
                     work_tile.x * p.tile_tokens, kv_head, kEvictFirst);
    }
#pragma unroll 1
    for (int left = work_tile.z; left > 0; --left) {
      if (left == min(work_tile.z, kBlocksAfterIssued)) mbar_arrive(smem.issued());
      const int present = left == 1 ? work_tile.w : C::kBlockN;
      mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
      mbar_expect(smem.k_full(ks.stage), C::kKBytes);
      const ListedKeys after = copy_step<C>(p, &p.k_maps[0], smem.k(ks.stage),
                                            smem.k_full(ks.stage), kv_head, keys, present);
      ks.advance();
      mbar_wait(smem.v_empty(vs.stage), vs.phase ^ 1);
      mbar_expect(smem.v_full(vs.stage), C::kVBytes);
      copy_step<C>(p, &p.v_maps[0], smem.v(vs.stage), smem.v_full(vs.stage), kv_head, keys,
                   present);
      vs.advance();
      keys = after;
    }
    mbar_arrive(smem.work_empty(work_tiles.stage));
    work_tiles.advance();
  }
}

}  // namespace magi
