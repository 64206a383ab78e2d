// SPDX-License-Identifier: Apache-2.0
// The producer of the backward of index attention: one warpgroup, whose first thread starts the
// copies of Q and dout, and all of which bring lse and delta and gather the rows of K and V.
#pragma once

#include "ffa/sm90/index/gather.cuh"
#include "ffa/sm90/index/bwd/row_stats.cuh"
#include "ffa/sm90/index/bwd/smem.cuh"
#include "ffa/sm90/index/tile_walk.cuh"
#include "ffa/sm90/index/unused_rows.cuh"
#include "device/tma.cuh"

namespace magi {

// Rows that there are not are zeros.
template <typename C>
__device__ __forceinline__ void load_rows(const IndexBwdParams& p, const IndexBwdSmem<C>& smem,
                                          const WorkTile& tile) {
  const WorkTiles& w = p.work;
  if (threadIdx.x == 0) {
    mbar_expect(smem.q_full(), 2 * (C::kRows / 64) * (C::kD / 64) * w.rows * 128);
#pragma unroll
    for (int atom = 0; atom < C::kD / 64; ++atom)
#pragma unroll
      for (int group = 0; group < C::kRows / 64; ++group) {
        const uint32_t at = (atom * C::kRows + group * 64) * 128;
        const int head = group * w.head_step, token = tile.token + group * w.token_step;
        load_tile_4d(smem.q() + at, &p.q_map, smem.q_full(), atom * 64, head, token, tile.kv_head,
                     kEvictFirst);
        load_tile_4d(smem.dout() + at, &p.dout_map, smem.q_full(), atom * 64, head, token,
                     tile.kv_head, kEvictFirst);
      }
  }
  // Every time, because dq is exchanged over these rows.
  clear_unused_rows<C::kRows, C::kD, C::kProducers>(smem.q(), w.rows, threadIdx.x);
  clear_unused_rows<C::kRows, C::kD, C::kProducers>(smem.dout(), w.rows, threadIdx.x);
  if (threadIdx.x < C::kRows)
    load_row_stats(p, smem, query_row(w, tile, threadIdx.x / 64, threadIdx.x % 64));
  mbar_arrive(smem.q_full());
}

template <typename C>
__device__ void feed(const IndexBwdParams& p, const IndexBwdSmem<C>& smem) {
  using Rows = RowGather<C::kBlockN, C::kD>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<1> queries;
  Ring<C::kStages> stages;
  for (TileWalk walk(p.num_tiles); !walk.is_over(); walk.advance()) {
    const WorkTile tile = work_tile(p.work, p.tile_begin + walk.number);
    const KeyList list(p.keys, tile.list);
    mbar_wait(smem.q_empty(), queries.phase ^ 1);
    load_rows(p, smem, tile);
    queries.advance();
    __syncwarp();
    for (Rows rows(list, warp, lane); !rows.is_over();) {
      const int key = rows.next_key();
      mbar_wait(smem.k_empty(stages.stage), stages.phase ^ 1);
      rows.load(smem.k(stages.stage), p.k, tile.kv_head, key);
      async_copies_arrive(smem.k_full(stages.stage));
      mbar_wait(smem.v_empty(stages.stage), stages.phase ^ 1);
      rows.load(smem.v(stages.stage), p.v, tile.kv_head, key);
      async_copies_arrive(smem.v_full(stages.stage));
      stages.advance();
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
