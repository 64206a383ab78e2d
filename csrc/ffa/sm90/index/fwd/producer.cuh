// SPDX-License-Identifier: Apache-2.0
// The producer of the forward of index attention: one warpgroup, whose first thread starts the
// copies of Q and all of which gather the rows of K and V.
#pragma once

#include "ffa/sm90/index/gather.cuh"
#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/index/fwd/smem.cuh"
#include "ffa/sm90/index/tile_walk.cuh"
#include "device/tma.cuh"

namespace magi {

template <typename C>
__device__ __forceinline__ void load_q(const IndexFwdParams& p, const IndexFwdSmem<C>& smem,
                                       uint32_t stage, const WorkTile& tile) {
  const WorkTiles& w = p.work;
  mbar_expect(smem.q_full(stage), C::kGroups * (C::kD / 64) * w.rows * 128);
#pragma unroll
  for (int atom = 0; atom < C::kD / 64; ++atom)
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group)
      load_tile_4d(smem.q(stage) + (atom * C::kBlockM + group * 64) * 128, &p.q_map,
                   smem.q_full(stage), atom * 64, group * w.head_step,
                   tile.token + group * w.token_step, tile.kv_head, kEvictFirst);
}

template <typename C>
__device__ void feed(const IndexFwdParams& p, const IndexFwdSmem<C>& smem) {
  static_assert(C::kD == C::kDv, "one way to gather both");
  using Rows = RowGather<C::kBlockN, C::kD>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  Ring<C::kVStages> vs;
  for (TileWalk walk(p.work.num_tiles()); !walk.is_over(); walk.advance()) {
    const WorkTile tile = work_tile(p.work, walk.number);
    const KeyList list(p.keys, tile.list);
    if (threadIdx.x == 0) {
      mbar_wait(smem.q_empty(qs.stage), qs.phase ^ 1);
      load_q(p, smem, qs.stage, tile);
    }
    __syncwarp();
    qs.advance();
    for (Rows rows(list, warp, lane); !rows.is_over();) {
      const int key = rows.next_key();
      mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
      rows.load(smem.k(ks.stage), p.k, tile.kv_head, key);
      async_copies_arrive(smem.k_full(ks.stage));
      ks.advance();
      mbar_wait(smem.v_empty(vs.stage), vs.phase ^ 1);
      rows.load(smem.v(vs.stage), p.v, tile.kv_head, key);
      async_copies_arrive(smem.v_full(vs.stage));
      vs.advance();
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
