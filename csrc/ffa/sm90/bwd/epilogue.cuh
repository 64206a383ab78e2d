// SPDX-License-Identifier: Apache-2.0
// Writes dk and dv of a work tile: rounded and staged over the rows of K and V, or as float32
// straight from the registers.
#pragma once

#include <type_traits>

#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/schedule/split.cuh"
#include "ffa/sm90/bwd/mainloop.cuh"

namespace magi {

// The warpgroup's 64 rows to its rows of a tile in shared memory.
template <typename C, int kValues>
__device__ __forceinline__ void stage_grad(uint32_t tile, const float (&grad)[kValues],
                                           float factor) {
  using T = typename C::T;
  const int thread = thread_again() - 128, lane = thread % 32, matrix = lane / 8;
  // Lane 8i + l addresses row l of matrix i: (rows 0-7, rows 8-15) x (chunk, chunk + 1) of 8
  // columns.
  const int row = thread / 32 * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < kValues / 4; j += 2) {
    const int chunk = j % 8 + (matrix >> 1);
    const uint32_t at = tile + j / 8 * (C::kBlockN * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
    store_matrix_x4(at, pack_pair<T>(grad[4 * j] * factor, grad[4 * j + 1] * factor),
                    pack_pair<T>(grad[4 * j + 2] * factor, grad[4 * j + 3] * factor),
                    pack_pair<T>(grad[4 * j + 4] * factor, grad[4 * j + 5] * factor),
                    pack_pair<T>(grad[4 * j + 6] * factor, grad[4 * j + 7] * factor));
  }
}

// `to` is row 0 of the tile, the next is `stride` values on; rows from `rows` on do not exist.
template <int kValues>
__device__ __forceinline__ void write_float_grad(float* to, int rows, int stride, int head_dim,
                                                 const float (&grad)[kValues], float factor,
                                                 bool adds) {
  const int thread = thread_again() - 128, lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = thread / 32 * 16 + lane / 4 + 8 * r;
    if (key >= rows) continue;
    float* row = to + static_cast<int64_t>(key) * stride;
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
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
template <typename C, int kColumns>
__device__ __forceinline__ void send_staged_grad(const BwdKernelParams& p, int64_t to, int head_dim,
                                                 uint32_t tile, int head) {
  const int first = (thread_again() / 128 - 1) * 64;
#pragma unroll 2
  for (int i = thread_again() % 128; i < 64 * kColumns / 8; i += 128) {
    const int row = first + i / (kColumns / 8), chunk = i % (kColumns / 8), column = 8 * chunk;
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

// The tile and kv head that gradients belong to, and the fourth word of the work tile.
struct GradPlace {
  int tile, head, word;
};
// In place of the gradient that another pass makes.
struct NoGrad {};

// The registers of the first kColumns columns of an accumulator.
template <int kColumns, int kValues>
__device__ __forceinline__ float (&columns_of(float (&grad)[kValues])) [kColumns / 2] {
  static_assert(kColumns / 2 <= kValues, "not so many columns");
  return reinterpret_cast<float (&)[kColumns / 2]>(grad);
}

// Where dk, or dv, of a work tile goes.
template <typename C, bool kIsDk>
struct GradWriter {
  static constexpr int kColumns = kIsDk ? C::kD : C::kDv;
  const BwdKernelParams& p;
  const BwdSmem<C>& smem;
  const GradPlace at;

  __device__ __forceinline__ int head_dim() const { return kIsDk ? p.head_dim : p.head_dim_v; }
  __device__ __forceinline__ float factor() const { return kIsDk ? p.grad_scale : 1.f; }
  __device__ __forceinline__ uint32_t staged() const { return kIsDk ? smem.k() : smem.v(); }
  __device__ __forceinline__ int64_t target(int bytes) const {
    return target_of<C>(p, kIsDk ? p.remote.dk_targets : p.remote.dv_targets, at.tile, head_dim(),
                        bytes);
  }

  // A part, to be added to others.
  template <typename Grad>
  __device__ __forceinline__ void write_partial(const Grad& grad) const {
    const int64_t row = (split_of_work_tile(at.word) * p.num_partials + partial_idx(at.word) - 1) *
                        static_cast<int64_t>(C::kBlockN);
    write_float_grad((kIsDk ? p.dk_split : p.dv_split) + row * head_dim(), C::kBlockN, head_dim(),
                     head_dim(), grad, factor(), false);
  }

  // `summed`: the tile's number among those that wait for others, or -1.
  template <typename Grad>
  __device__ __forceinline__ void write_float(const Grad& grad, bool is_remote, int summed) const {
    // What leaves this rank, or waits for others, has room for whole tiles.
    const int rows =
        is_remote || summed >= 0 ? C::kBlockN : p.remote.local_keys - at.tile * C::kBlockN;
    float* to;
    if (is_remote) {
      to = reinterpret_cast<float*>(target(4));
    } else {
      to = summed >= 0 ? (kIsDk ? p.remote.dk_sums : p.remote.dv_sums)
                       : static_cast<float*>(kIsDk ? p.dk : p.dv) +
                             BwdHeadSplit<C>::of_word(at.word).heads *
                                 (kIsDk ? p.dk_stride_part : p.dv_stride_part);
      to += static_cast<int64_t>(summed >= 0 ? summed : at.tile) * C::kBlockN * p.heads_kv *
            head_dim();
    }
    write_float_grad(to + at.head * head_dim(), rows, p.heads_kv * head_dim(), head_dim(), grad,
                     factor(), p.accumulate);
  }

  template <typename Grad>
  __device__ __forceinline__ void stage(const Grad& grad) const {
    stage_grad<C>(staged(), grad, factor());
  }
  __device__ __forceinline__ void send_staged() const {
    send_staged_grad<C, kColumns>(p, target(2), head_dim(), staged(), at.head);
  }
  // One thread of the warpgroup whose rows begin at `key`.
  __device__ __forceinline__ void store_staged(int key, uint32_t rows) const {
#pragma unroll
    for (int d = 0; d < (kColumns + 63) / 64; ++d)
      store_tile_3d(kIsDk ? &p.dk_map : &p.dv_map, staged() + d * C::kBlockN * 128 + rows, d * 64,
                    key, at.head);
  }
};

// Calls `run` with the writer of each gradient that there is, and the gradient.
template <typename C, typename Dk, typename Dv, typename Run>
__device__ __forceinline__ void for_each_grad(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                              const GradPlace& at, const Dk& dk, const Dv& dv,
                                              Run run) {
  if constexpr (!std::is_same_v<Dv, NoGrad>) run(GradWriter<C, false>{p, smem, at}, dv);
  if constexpr (!std::is_same_v<Dk, NoGrad>) run(GradWriter<C, true>{p, smem, at}, dk);
}

// Both warpgroups are through with K and V.
template <typename C, typename Dk, typename Dv>
__device__ __forceinline__ void write_grads(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                            const GradPlace& at, const Dk& dk, const Dv& dv) {
  const int group = uniform(thread_again() / 128 - 1);
  const bool leads = thread_again() % 128 == 0;
  auto each = [&](auto run) { for_each_grad<C>(p, smem, at, dk, dv, run); };
  if (is_partial<C>(p, at.word)) {
    each([](const auto& writer, const auto& grad) { writer.write_partial(grad); });
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  const bool is_remote = at.tile * C::kBlockN >= p.remote.base;
  const int summed = summed_tile(p.remote, at.tile);
  if (is_remote ? p.remote.wire_is_float : p.grads_are_float || summed >= 0) {
    each(
        [&](const auto& writer, const auto& grad) { writer.write_float(grad, is_remote, summed); });
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  each([](const auto& writer, const auto& grad) { writer.stage(grad); });
  fence_async_proxy();
  named_barrier(kGroupBarrier + group, 128);
  if (is_remote) {
    each([](const auto& writer, const auto&) { writer.send_staged(); });
    fence_async_proxy();  // the next K and V are copied over what was just read
    named_barrier(kGroupBarrier + group, 128);
    if (leads) mbar_arrive(smem.kv_empty());
    return;
  }
  if (!leads) return;
  const int key = at.tile * C::kBlockN + group * 64;
  if (key < p.remote.local_keys)
    each([&](const auto& writer, const auto&) { writer.store_staged(key, group * 64 * 128); });
  store_commit();
  store_wait_read();
  mbar_arrive(smem.kv_empty());
}

}  // namespace magi
