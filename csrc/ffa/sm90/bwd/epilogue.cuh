// SPDX-License-Identifier: Apache-2.0
// Writes dk and dv of a work tile: rounded and staged over the rows of K and V, or as float32
// straight from the registers.
#pragma once

#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/bwd/mainloop.cuh"

namespace magi {

// The warpgroup's 64 rows to its rows of a tile in shared memory.
template <typename C>
__device__ __forceinline__ void stage_grad(uint32_t tile, const float (&grad)[C::kOut / 2],
                                           float factor) {
  using T = typename C::T;
  const int thread = thread_again() - 128, lane = thread % 32, matrix = lane / 8;
  // Lane 8i + l addresses row l of matrix i: (rows 0-7, rows 8-15) x (chunk, chunk + 1) of 8
  // columns.
  const int row = thread / 32 * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < C::kOut / 8; j += 2) {
    const int chunk = j % 8 + (matrix >> 1);
    const uint32_t at = tile + j / 8 * (C::kBlockN * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
    store_matrix_x4(at, pack_pair<T>(grad[4 * j] * factor, grad[4 * j + 1] * factor),
                    pack_pair<T>(grad[4 * j + 2] * factor, grad[4 * j + 3] * factor),
                    pack_pair<T>(grad[4 * j + 4] * factor, grad[4 * j + 5] * factor),
                    pack_pair<T>(grad[4 * j + 6] * factor, grad[4 * j + 7] * factor));
  }
}

// `to` is row 0 of the tile, the next is `stride` values on; rows from `rows` on do not exist.
template <typename C>
__device__ __forceinline__ void write_float_grad(float* to, int rows, int stride, int head_dim,
                                                 const float (&grad)[C::kOut / 2], float factor,
                                                 int pass, bool adds) {
  const int thread = thread_again() - 128, lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = thread / 32 * 16 + lane / 4 + 8 * r;
    if (key >= rows) continue;
    float* row = to + static_cast<int64_t>(key) * stride;
#pragma unroll
    for (int j = 0; j < C::kOut / 8; ++j) {
      const int column = pass * C::kOut + 8 * j + 2 * (lane % 4);
      if (column >= head_dim) continue;
      float2* at = reinterpret_cast<float2*>(row + column);
      float2 value = make_float2(grad[4 * j + 2 * r] * factor, grad[4 * j + 2 * r + 1] * factor);
      if (adds) {
        const float2 old = *at;
        value.x += old.x;
        value.y += old.y;
      }
      *at = value;
    }
  }
}

// The warpgroup's staged rows of a remote tile to its owner, whose row 0 of the tile is at `to`.
template <typename C>
__device__ __forceinline__ void send_staged_grad(const BwdKernelParams& p, int64_t to, int head_dim,
                                                 uint32_t tile, int head, int pass) {
  const int first = (thread_again() / 128 - 1) * 64;
#pragma unroll 2
  for (int i = thread_again() % 128; i < 64 * C::kOut / 8; i += 128) {
    const int row = first + i / (C::kOut / 8), chunk = i % (C::kOut / 8),
              column = pass * C::kOut + 8 * chunk;
    if (column >= head_dim) continue;
    const int4 value = lds_int4(tile + chunk / 8 * (C::kBlockN * 128) + row * 128 +
                                ((chunk % 8 ^ (row & 7)) << 4));
    *reinterpret_cast<int4*>(
        to + 2 * ((static_cast<int64_t>(row) * p.heads_kv + head) * head_dim + column)) = value;
  }
}

// Row 0 of a remote tile in its owner's memory.
template <typename C>
__device__ __forceinline__ int64_t target_of(const BwdKernelParams& p, const int64_t* targets,
                                             int tile, int head_dim, int bytes) {
  const int remote = tile - p.remote.base / kRemoteTile;
  return targets[p.remote.owners[remote]] +
         static_cast<int64_t>(p.remote.target_rows[remote]) * p.heads_kv * head_dim * bytes;
}

// Both warpgroups are through with K and V.
template <typename C>
__device__ __forceinline__ void write_grads(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                            const float (&dk)[C::kOut / 2],
                                            const float (&dv)[C::kOut / 2], int tile, int head,
                                            int word) {
  const BwdHeadSplit<C> part = BwdHeadSplit<C>::of_word(word);
  const int pass = part.pass;
  const int group = uniform(thread_again() / 128 - 1);
  const bool leads = thread_again() % 128 == 0;
  if (is_partial<C>(p, word)) {
    const int64_t row = (split_of_work_tile(word) * p.num_partials + partial_idx(word) - 1) *
                        static_cast<int64_t>(C::kBlockN);
    write_float_grad<C>(p.dv_split + row * p.head_dim_v, C::kBlockN, p.head_dim_v, p.head_dim_v, dv,
                        1.f, pass, false);
    write_float_grad<C>(p.dk_split + row * p.head_dim, C::kBlockN, p.head_dim, p.head_dim, dk,
                        p.grad_scale, pass, false);
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  const bool is_remote = tile * C::kBlockN >= p.remote.base;
  const int summed = summed_tile(p.remote, tile);
  if (is_remote ? p.remote.wire_is_float : p.grads_are_float || summed >= 0) {
    // What leaves this rank, or waits for others, has room for whole tiles.
    const int rows =
        is_remote || summed >= 0 ? C::kBlockN : p.remote.local_keys - tile * C::kBlockN;
    const int64_t first =
        static_cast<int64_t>(summed >= 0 ? summed : tile) * C::kBlockN * p.heads_kv;
    float* to_v =
        summed >= 0 ? p.remote.dv_sums : static_cast<float*>(p.dv) + part.heads * p.dv_stride_part;
    to_v =
        is_remote
            ? reinterpret_cast<float*>(target_of<C>(p, p.remote.dv_targets, tile, p.head_dim_v, 4))
            : to_v + first * p.head_dim_v;
    write_float_grad<C>(to_v + head * p.head_dim_v, rows, p.heads_kv * p.head_dim_v, p.head_dim_v,
                        dv, 1.f, pass, p.accumulate);
    float* to_k =
        summed >= 0 ? p.remote.dk_sums : static_cast<float*>(p.dk) + part.heads * p.dk_stride_part;
    to_k = is_remote
               ? reinterpret_cast<float*>(target_of<C>(p, p.remote.dk_targets, tile, p.head_dim, 4))
               : to_k + first * p.head_dim;
    write_float_grad<C>(to_k + head * p.head_dim, rows, p.heads_kv * p.head_dim, p.head_dim, dk,
                        p.grad_scale, pass, p.accumulate);
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  stage_grad<C>(smem.v(), dv, 1.f);
  stage_grad<C>(smem.k(), dk, p.grad_scale);
  fence_async_proxy();
  named_barrier(kGroupBarrier + group, 128);
  if (is_remote) {
    send_staged_grad<C>(p, target_of<C>(p, p.remote.dv_targets, tile, p.head_dim_v, 2),
                        p.head_dim_v, smem.v(), head, pass);
    send_staged_grad<C>(p, target_of<C>(p, p.remote.dk_targets, tile, p.head_dim, 2), p.head_dim,
                        smem.k(), head, pass);
    fence_async_proxy();  // the next K and V are copied over what was just read
    named_barrier(kGroupBarrier + group, 128);
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  if (!leads) return;
  const int key = tile * C::kBlockN + group * 64, rows = group * 64 * 128;
  if (key < p.remote.local_keys) {
#pragma unroll
    for (int d = 0; d < C::kOut / 64; ++d) {
      store_tile_3d(&p.dv_map, smem.v() + d * C::kBlockN * 128 + rows, pass * C::kOut + d * 64, key,
                    head);
      store_tile_3d(&p.dk_map, smem.k() + d * C::kBlockN * 128 + rows, pass * C::kOut + d * 64, key,
                    head);
    }
  }
  store_commit();
  store_wait_read();
  mbar_arrive(smem.kv_empty());
}

}  // namespace magi
