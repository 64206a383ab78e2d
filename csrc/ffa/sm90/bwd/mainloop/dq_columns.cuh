// SPDX-License-Identifier: Apache-2.0
// dq of a step by one consumer warpgroup: its columns, their product, and their store: added in L2
// straight from the registers, or left in shared memory for the lanes that store dq
// (bwd/producer/dq_store.cuh).
#pragma once

#include "device/atomics.cuh"
#include "device/registers.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/wgmma.cuh"
#include "ffa/sm90/bwd/rows/dq_layout.cuh"
#include "ffa/sm90/bwd/smem.cuh"

namespace magi {

// A descriptor so many steps along an operand. In narrow steps in deterministic order most masks
// took longer with the first of these (docs/log/ffa_backward_turns.md).
template <typename C>
__device__ __forceinline__ uint64_t along(uint32_t low, int step) {
  return C::kSemaphored && !C::kIsWide ? operand_by_words(low, step) : operand(low, step);
}

template <typename C>
struct DqColumns {
  using Dq = float[C::kDqValues];
  // Chunks of four values of dq that leave as soon as they are there, and values that wait until
  // the next scores are being multiplied: all at once would hold the warps for a third of a step.
  static constexpr int kNow =
      C::kIsGeneral || !C::kDirectDq || C::kDqColumns > 64 ? C::kDqValues / 4 : C::kDqValues / 8;
  static constexpr int kRest = C::kDqValues - 4 * kNow;
  using Rest = float[kRest > 0 ? kRest : 1];

  const BwdKernelParams& p;
  const BwdSmem<C>& smem;

  // This warpgroup's share of the columns of dq lies together, but for head dims 192 and 96. There
  // it is in two runs, each in a column tile of 64, as a product takes no more: of 192, the first
  // or the last tile and half of the one between them; of 96, half of each tile.
  static constexpr bool kHasHalfTile = C::kDqColumns % 48 == 0;
  static constexpr int kHalfColumns = C::kDqColumns / 3;
  static constexpr int kFirstColumns = kHasHalfTile ? 2 * kHalfColumns : C::kDqColumns;
  static constexpr int kFirstChunks = C::kDqQueries * kFirstColumns / 512;  // of four values
  __device__ __forceinline__ static int first_column() {
    if constexpr (C::kSharesQueries) return 0;
    return (thread_again() / 128 - 1) * (C::kDqColumns == 96 ? 128 : kFirstColumns);
  }
  __device__ __forceinline__ static int half_tile_column() {
    return 64 + (thread_again() / 128 - 1) * kHalfColumns;
  }

  // The queries by columns of dq, or transposed.
  template <int kValues>
  __device__ __forceinline__ void multiply_columns(float (&dq)[kValues], uint32_t ds,
                                                   int column) const {
    constexpr int kColumns = 128 * kValues / C::kDqQueries;
    using Mma =
        Wgmma<typename C::T, C::kIsTransposed ? C::kBlockM : kColumns, C::kIsTransposed ? 0 : 1>;
    const int first_query = C::kSharesQueries ? (thread_again() / 128 - 1) * C::kDqQueries : 0;
    const uint32_t grads = uniform(operand_low(ds + first_query * 128, 16));
    const uint32_t keys =
        uniform(operand_low(smem.k() + column / 64 * C::kBlockN * 128 + column % 64 * 2,
                            kColumns > 64 ? C::kBlockN * 128 : 16));
#pragma unroll
    for (int step = 0; step < C::kBlockN / 16; ++step) {
      const uint64_t of_grads = along<C>(grads, (step / 4 * C::kBlockM * 128 + step % 4 * 32) / 16);
      const uint64_t of_keys = along<C>(keys, step * 2048 / 16);
      if constexpr (C::kIsTransposed)
        Mma::template ss<1>(dq, of_keys, of_grads, step > 0);
      else
        Mma::ss(dq, of_grads, of_keys, step > 0);
    }
  }

  __device__ __forceinline__ void multiply(Dq& dq, uint32_t ds) const {
    if constexpr (kHasHalfTile) {
      constexpr int kFirst = 4 * kFirstChunks;
      multiply_columns(reinterpret_cast<float (&)[kFirst]>(dq), ds, first_column());
      multiply_columns(reinterpret_cast<float (&)[C::kDqValues - kFirst]>(dq[kFirst]), ds,
                       half_tile_column());
    } else {
      multiply_columns(dq, ds, first_column());
    }
  }

  // Number of the block of dq_accum, of 64 columns, where the share begins, of a step of which that
  // is the first word; 32 bits do.
  __device__ __forceinline__ static uint32_t block(uint32_t number) {
    if constexpr (C::kSharesQueries)
      return number * (C::kGroups * C::kAtoms) + (thread_again() / 128 - 1) * C::kAtoms;
    return number * C::kAtoms + first_column() / 64;
  }

  // Where this thread adds its share of it.
  __device__ __forceinline__ float* address(uint32_t number) const {
    return p.dq_accum + static_cast<uint64_t>(number) * dq_block_floats(C::kRowBlockM) +
           (first_column() % 64 * 64 + thread_again() % 128 * 4);
  }
  // And a chunk of it, from there on.
  __device__ __forceinline__ static int chunk_at(int i) {
    return i < kFirstChunks ? 512 * i
                            : 512 * (i - kFirstChunks) + 64 * (half_tile_column() - first_column());
  }

  __device__ __forceinline__ void add_rest(const Rest& rest, uint32_t number) const {
    float* at = address(number);
#pragma unroll
    for (int i = 0; i < kRest / 4; ++i)
      add_to_global_x4(at + chunk_at(kNow + i), rest[4 * i], rest[4 * i + 1], rest[4 * i + 2],
                       rest[4 * i + 3]);
  }

  // The first chunks of dq; the others into `rest`. These first: additions hold their registers
  // until they are on their way, and nothing that takes one of them could go on.
  __device__ __forceinline__ void add_now(const Dq& dq, Rest& rest, uint32_t number) const {
#pragma unroll
    for (int i = 0; i < kRest; ++i) rest[i] = own_copy(dq[4 * kNow + i]);
    float* at = address(number);
#pragma unroll
    for (int i = 0; i < kNow; ++i)
      add_to_global_x4(at + chunk_at(i), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  // Rounded chunks of dq, from `first_chunk` on, to tiles of 64 columns.
  template <int kChunks>
  __device__ __forceinline__ void stage_columns(const Dq& dq, int first_chunk, int column) const {
    const auto chunk = [&](int i) {
      const int at = 4 * (first_chunk + i);
      return make_float4(dq[at], dq[at + 1], dq[at + 2], dq[at + 3]);
    };
    stage_dq<typename C::T, C::kBlockM, kChunks>(smem.dq() + column / 64 * (C::kBlockM * 128),
                                                 chunk, p.grad_scale, thread_again() % 128,
                                                 column % 64 / 8);
  }

  __device__ __forceinline__ void leave_rounded(const Dq& dq) const {
    static_assert(kFirstColumns <= 64 || C::kDqColumns == 128, "whole tiles");
#pragma unroll
    for (int column = 0; column < kFirstColumns; column += 64)
      stage_columns<(kFirstColumns < 64 ? kFirstChunks : C::kBlockM / 8)>(
          dq, column / 64 * (C::kBlockM / 8), first_column() + column);
    if constexpr (kHasHalfTile)
      stage_columns<C::kDqValues / 4 - kFirstChunks>(dq, kFirstChunks, half_tile_column());
  }

  // This warpgroup's share of dq to where the feeding side takes it up; rounded if this is the only
  // contribution of the block, as tiles of 64 columns.
  __device__ __forceinline__ void leave(const Dq& dq, int what) const {
    if constexpr (C::kDirectStore) {
      if (what & kDirectStoreBit) {
        leave_rounded(dq);
        return;
      }
    }
    if constexpr (kHasHalfTile) {
      // In the order of columns, as dq_accum is.
      const int begins = C::kDqColumns * (thread_again() / 128 - 1);
      store_chunks<0, kFirstChunks>(dq, staged() + 256 * (first_column() - begins));
      store_chunks<kFirstChunks, C::kDqValues / 4>(dq,
                                                   staged() + 256 * (half_tile_column() - begins));
    } else {
      store_chunks<0, C::kDqValues / 4>(dq, staged());
    }
  }

  // Where this thread leaves its share of dq: each warpgroup has a place of its own, but over dS.
  __device__ __forceinline__ uint32_t staged() const {
    if constexpr (C::kDqOverDs)
      return smem.dq() + 16 * (thread_again() % 128);
    else
      return smem.dq() + 16 * (thread_again() - 128) +
             (C::kDqBytes - 2048) * (thread_again() / 128 - 1);
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ static void store_chunks(const Dq& dq, uint32_t at) {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i)
      sts_float4(at + 2048 * (i - kFrom), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
};

}  // namespace magi
