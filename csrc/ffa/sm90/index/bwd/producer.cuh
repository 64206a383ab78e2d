// SPDX-License-Identifier: Apache-2.0
// The feeding side of the backward of index attention: one warpgroup, whose first thread starts the
// copies of Q and dout, and all of which bring lse and delta and gather the rows of K and V.
#pragma once

#include "ffa/common/scores.cuh"
#include "ffa/common/shared.cuh"
#include "ffa/sm90/index/gather.cuh"
#include "ffa/sm90/index/bwd/params.h"
#include "ffa/sm90/index/bwd/smem.cuh"
#include "ffa/sm90/index/list_walk.cuh"
#include "ffa/sm90/tma.cuh"

namespace magi {

// Heads that there are not get lse and delta 0: their rows of Q and dout are zeros, and so is what
// they add.
template <typename C>
__device__ __forceinline__ void load_heads(const IndexBwdParams& p, const IndexBwdSmem<C>& smem,
                                           int token, int kv_head) {
  if (threadIdx.x == 0) {
    mbar_expect(smem.q_full(), 2 * C::kQBytes);
#pragma unroll
    for (int atom = 0; atom < C::kD / 64; ++atom)
#pragma unroll
      for (int head = 0; head < C::kHeads; head += 64) {
        const uint32_t at = (atom * C::kHeads + head) * 128;
        load_tile_4d(smem.q() + at, &p.q_map, smem.q_full(), atom * 64, head, kv_head, token,
                     kEvictFirst);
        load_tile_4d(smem.dout() + at, &p.dout_map, smem.q_full(), atom * 64, head, kv_head, token,
                     kEvictFirst);
      }
  }
  const int head = threadIdx.x;
  if (head < C::kHeads) {
    const int64_t at = static_cast<int64_t>(token) * p.heads_q + kv_head * p.group + head;
    const bool exists = head < p.group;
    sts_int(smem.lse() + 4 * head, __float_as_int(exists ? __ldg(p.lse + at) * kLog2e : 0.f));
    sts_int(smem.delta() + 4 * head, __float_as_int(exists ? __ldg(p.delta + at) : 0.f));
  }
  mbar_arrive(smem.q_full());
}

template <typename C>
__device__ void feed(const IndexBwdParams& p, const IndexBwdSmem<C>& smem) {
  using Rows = RowGather<C::kBlockN, C::kD>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<1> heads;
  Ring<C::kStages> rows;
  for (ListWalk walk(p.num_lists); !walk.is_over(); walk.advance()) {
    const int number = p.list_begin + walk.list;
    const int token = number / p.heads_kv, kv_head = number - token * p.heads_kv;
    const int32_t* list = p.lists + static_cast<int64_t>(number) * p.max_keys;
    const int count = __ldg(p.counts + number);
    mbar_wait(smem.q_empty(), heads.phase ^ 1);
    load_heads(p, smem, token, kv_head);
    heads.advance();
    __syncwarp();
    const uint8_t* k = p.k + kv_head * p.k_head_bytes;
    const uint8_t* v = p.v + kv_head * p.v_head_bytes;
    int next = Rows::key(list, 0, count, warp, lane);
    for (int first = 0; first < count; first += C::kBlockN) {
      const int key = next;
      next = Rows::key(list, first + C::kBlockN, count, warp, lane);
      mbar_wait(smem.k_empty(rows.stage), rows.phase ^ 1);
      Rows::load(smem.k(rows.stage), k, p.k_token_bytes, key, p.k_chunks, warp, lane);
      async_copies_arrive(smem.k_full(rows.stage));
      mbar_wait(smem.v_empty(rows.stage), rows.phase ^ 1);
      Rows::load(smem.v(rows.stage), v, p.v_token_bytes, key, p.v_chunks, warp, lane);
      async_copies_arrive(smem.v_full(rows.stage));
      rows.advance();
    }
  }
  async_copies_wait_all();
}

}  // namespace magi
