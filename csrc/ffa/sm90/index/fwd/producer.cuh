// SPDX-License-Identifier: Apache-2.0
// The feeding side of the forward of index attention: one warpgroup, whose first thread starts the
// copies of Q and all of which gather the rows of K and V.
#pragma once

#include "ffa/sm90/index/gather.cuh"
#include "ffa/sm90/index/fwd/params.h"
#include "ffa/sm90/index/fwd/smem.cuh"
#include "ffa/sm90/index/list_walk.cuh"
#include "ffa/sm90/tma.cuh"

namespace magi {

template <typename C>
__device__ __forceinline__ void load_q(const IndexFwdParams& p, const IndexFwdSmem<C>& smem,
                                       uint32_t stage, int token, int kv_head) {
  mbar_expect(smem.q_full(stage), C::kQBytes);
#pragma unroll
  for (int atom = 0; atom < C::kD / 64; ++atom)
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group)
      load_tile_4d(smem.q(stage) + (atom * C::kBlockM + group * 64) * 128, &p.q_map,
                   smem.q_full(stage), atom * 64, group * 64, kv_head, token, kEvictFirst);
}

template <typename C>
__device__ void feed(const IndexFwdParams& p, const IndexFwdSmem<C>& smem) {
  using K = RowGather<C::kBlockN, C::kD>;
  using V = RowGather<C::kBlockN, C::kDv>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  Ring<C::kVStages> vs;
  for (ListWalk walk(p.num_lists); !walk.is_over(); walk.advance()) {
    const int token = walk.list / p.heads_kv, kv_head = walk.list - token * p.heads_kv;
    const int32_t* list = p.lists + static_cast<int64_t>(walk.list) * p.max_keys;
    const int count = __ldg(p.counts + walk.list);
    if (threadIdx.x == 0) {
      mbar_wait(smem.q_empty(qs.stage), qs.phase ^ 1);
      load_q(p, smem, qs.stage, token, kv_head);
    }
    __syncwarp();
    qs.advance();
    const uint8_t* k = p.k + kv_head * p.k_head_bytes;
    const uint8_t* v = p.v + kv_head * p.v_head_bytes;
    int next = K::key(list, 0, count, warp, lane);
    for (int first = 0; first < count; first += C::kBlockN) {
      const int key = next;
      next = K::key(list, first + C::kBlockN, count, warp, lane);
      mbar_wait(smem.k_empty(ks.stage), ks.phase ^ 1);
      K::load(smem.k(ks.stage), k, p.k_token_bytes, key, p.k_chunks, warp, lane);
      async_copies_arrive(smem.k_full(ks.stage));
      ks.advance();
      mbar_wait(smem.v_empty(vs.stage), vs.phase ^ 1);
      V::load(smem.v(vs.stage), v, p.v_token_bytes, key, p.v_chunks, warp, lane);
      async_copies_arrive(smem.v_full(vs.stage));
      vs.advance();
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
