// SPDX-License-Identifier: Apache-2.0
// Writes dk and dv of a tile of keys. Where its query heads are split, each part adds those of the
// parts before it, and the last one rounds the sum.
#pragma once

#include "ffa/sm90/bwd/epilogue.cuh"
#include "ffa/sm90/index/bwd/keys/producer.cuh"

namespace magi {

// Where a warpgroup's dv and dk of the heads so far lie in memory, as they lie in its registers.
template <typename C>
struct PartSums {
  float2* at;       // of this thread
  int32_t* summed;  // how many heads that are

  __device__ PartSums(const IndexKeysParams& p, int tile, int head, int group) {
    const int64_t number = 2 * (static_cast<int64_t>(head) * p.lists.num_tiles + tile) + group;
    at = reinterpret_cast<float2*>(p.sums) + number * (C::kD / 2 * 128) + thread_again() % 128;
    summed = p.lists.summed_heads + number;
  }

  // Parts are taken in order, so somebody is at work on those before, or through.
  __device__ __forceinline__ void wait(int heads, int group) const {
    if (thread_again() % 128 == 0)
      while (load_acquire(summed) != heads) {
      }
    named_barrier(kGroupBarrier + group, 128);
  }

  __device__ __forceinline__ void add_to(float (&grad)[C::kD / 2], int which) const {
#pragma unroll
    for (int i = 0; i < C::kD / 4; ++i) {
      const float2 x = load_shared_by_all(at + (which * (C::kD / 4) + i) * 128);
      grad[2 * i] += x.x;
      grad[2 * i + 1] += x.y;
    }
  }

  __device__ __forceinline__ void leave(const float (&grad)[C::kD / 2], int which) const {
#pragma unroll
    for (int i = 0; i < C::kD / 4; ++i)
      at[(which * (C::kD / 4) + i) * 128] = make_float2(grad[2 * i], grad[2 * i + 1]);
  }

  __device__ __forceinline__ void publish(int heads, int group) const {
    __threadfence();
    named_barrier(kGroupBarrier + group, 128);
    if (thread_again() % 128 == 0) store_release(summed, heads);
  }
};

// The warpgroup's 64 rows, rounded and staged over the rows of K and V.
template <typename C>
__device__ __forceinline__ void store_grads(const IndexKeysParams& p, const BwdSmem<C>& smem,
                                            const float (&dk)[C::kD / 2],
                                            const float (&dv)[C::kD / 2], int tile, int head,
                                            int group) {
  stage_grad<C>(smem.v(), dv, 1.f);
  stage_grad<C>(smem.k(), dk, p.grad_scale);
  fence_async_proxy();
  named_barrier(kGroupBarrier + group, 128);
  if (thread_again() % 128 != 0) return;
  const int key = tile * C::kBlockN + group * 64, rows = group * 64 * 128;
  if (key < p.total_k) {
#pragma unroll
    for (int d = 0; d < C::kD / 64; ++d) {
      store_tile_3d(&p.dv_map, smem.v() + d * C::kBlockN * 128 + rows, d * 64, key, head);
      store_tile_3d(&p.dk_map, smem.k() + d * C::kBlockN * 128 + rows, d * 64, key, head);
    }
  }
  store_commit();
  store_wait_read();
  mbar_arrive(smem.kv_empty());
}

// Both warpgroups are through with K and V. Of a tile without queries the last part alone writes.
template <typename C>
__device__ __forceinline__ void write_or_pass_on(const IndexKeysParams& p, const BwdSmem<C>& smem,
                                                 float (&dk)[C::kD / 2], float (&dv)[C::kD / 2],
                                                 int4 work_tile) {
  const TilePart part{work_tile.w};
  const int group = uniform(thread_again() / 128 - 1);
  const int before = part.first_head(), upto = before + part.heads();
  const PartSums<C> sums(p, work_tile.x, work_tile.y, group);
  if (before > 0 && work_tile.z > 0) {
    sums.wait(before, group);
    sums.add_to(dv, 0);
    sums.add_to(dk, 1);
  }
  if (upto == p.group) return store_grads<C>(p, smem, dk, dv, work_tile.x, work_tile.y, group);
  if (work_tile.z > 0) {
    sums.leave(dv, 0);
    sums.leave(dk, 1);
    sums.publish(upto, group);
  }
  if (thread_again() % 128 == 0) mbar_arrive(smem.kv_empty());
}

}  // namespace magi
