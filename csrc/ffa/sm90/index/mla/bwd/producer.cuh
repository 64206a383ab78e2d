// SPDX-License-Identifier: Apache-2.0
// The producer of the backward of index attention in MLA's form: one warpgroup, whose first
// thread starts the copies of Q and dout, and all of which bring lse and delta and gather latents.
#pragma once

#include "ffa/sm90/index/bwd/row_stats.cuh"
#include "ffa/sm90/index/mla/bwd/smem.cuh"
#include "ffa/sm90/index/mla/gather.cuh"
#include "ffa/sm90/index/mla/work_item.cuh"
#include "ffa/sm90/index/unused_rows.cuh"
#include "device/tma.cuh"

namespace magi {

// Rows that there are not are zeros.
template <typename C>
__device__ __forceinline__ void load_latent_queries(const IndexBwdParams& p,
                                                    const MlaBwdSmem<C>& smem,
                                                    const WorkItem& item) {
  const WorkTiles& w = p.work;
  if (threadIdx.x == 0) {
    mbar_expect(smem.q_full(), (C::kAtoms + C::kValueAtoms) * w.rows * 128);
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom) {
      load_tile_4d(smem.q() + atom * C::kAtomBytes, &p.q_map, smem.q_full(), atom * 64, item.head,
                   item.token, item.tile.kv_head, kEvictFirst);
      if (atom < C::kValueAtoms)
        load_tile_4d(smem.dout() + atom * C::kAtomBytes, &p.dout_map, smem.q_full(), atom * 64,
                     item.head, item.token, item.tile.kv_head, kEvictFirst);
    }
  }
  // Q every time, because dq is staged over these rows.
  clear_unused_rows<C::kRows, C::kD, C::kProducers>(smem.q(), w.rows, threadIdx.x);
  clear_unused_rows<C::kRows, C::kDv, C::kProducers>(smem.dout(), w.rows, threadIdx.x);
  if (threadIdx.x < C::kRows)
    load_row_stats(p, smem, query_row(w, item.tile, item.half, threadIdx.x));
  mbar_arrive(smem.q_full());
}

template <typename C>
__device__ void feed_latents(const IndexBwdParams& p, const MlaBwdSmem<C>& smem) {
  static_assert(LatentGather::kRows == C::kBlockN, "a block is gathered at a time");
  uint32_t q_phase = 0, k_phase = 0;
#pragma unroll 1
  for (TileWalk walk(p.num_tiles * p.work.groups); !walk.is_over(); walk.advance()) {
    const WorkItem item(p.work, walk.number, p.tile_begin);
    const KeyList list(p.keys, item.tile.list);
    mbar_wait(smem.q_empty(), q_phase ^ 1);
    load_latent_queries(p, smem, item);
    q_phase ^= 1;
    __syncwarp();
    for (LatentGather rows(list, p.k, threadIdx.x); !rows.is_over(); k_phase ^= 1) {
      rows.next_block(item.tile.kv_head);
      rows.template load_parts<C>(
          smem.k(), k_phase, [&](int part) { return smem.k_empty(part); },
          [&](int part) { return smem.k_full(part); });
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
