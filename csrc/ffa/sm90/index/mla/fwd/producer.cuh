// SPDX-License-Identifier: Apache-2.0
// The producer of the forward of index attention in MLA's form: one warpgroup, whose first
// thread starts the copies of Q and all of which gather rows of latents.
#pragma once

#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/index/mla/fwd/smem.cuh"
#include "ffa/sm90/index/mla/gather.cuh"
#include "ffa/sm90/index/mla/work_item.cuh"
#include "device/tma.cuh"

namespace magi {

template <typename C>
__device__ __forceinline__ void load_latent_q(const IndexFwdParams& p, const MlaFwdSmem<C>& smem,
                                              const WorkItem& item) {
  mbar_expect(smem.q_full(), C::kD / 64 * p.work.rows * 128);
#pragma unroll
  for (int atom = 0; atom < C::kD / 64; ++atom)
    load_tile_4d(smem.q() + atom * C::kAtomBytes, &p.q_map, smem.q_full(), atom * 64, item.head,
                 item.token, item.tile.kv_head, kEvictFirst);
}

template <typename C>
__device__ void feed_latents(const IndexFwdParams& p, const MlaFwdSmem<C>& smem) {
  static_assert(LatentGather::kRows == C::kBlockN, "a block is gathered at a time");
  uint32_t q_phase = 0, phases[C::kStages] = {0, 0};
  for (TileWalk walk(num_work_items(p.work)); !walk.is_over(); walk.advance()) {
    const WorkItem item(p.work, walk.number);
    const KeyList list(p.keys, item.tile.list);
    const auto ask_q = [&] {
      if (threadIdx.x == 0) {
        mbar_wait(smem.q_empty(), q_phase ^ 1);
        load_latent_q(p, smem, item);
      }
      __syncwarp();
      q_phase ^= 1;
    };
    // Q has the room in which the output of the item before is staged, so blocks come first.
    const int blocks = (list.count + C::kBlockN - 1) / C::kBlockN;
    if (blocks == 0) ask_q();
    LatentGather rows(list, p.k, threadIdx.x);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const uint32_t stage = block % C::kStages;
      const uint32_t phase = stage == 0 ? phases[0] : phases[1];
      rows.next_block(item.tile.kv_head);
      rows.template load_parts<C>(
          smem.k(stage), phase, [&](int part) { return smem.k_empty(stage, part); },
          [&](int part) { return smem.k_full(stage, part); });
      phases[0] ^= stage == 0;
      phases[1] ^= stage == 1;
      if (block == min(blocks, C::kStages) - 1) ask_q();
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
