// SPDX-License-Identifier: Apache-2.0
// Scores of blocks of keys for each head: products have heads as rows and keys as columns, so a
// thread has a quarter of the keys of four rows, and keeps the maximum of the block that it is in.
#pragma once

#include <climits>
#include <cmath>

#include "device/arithmetic.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/indexer/rank.cuh"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

template <typename C>
class HeadMaxima {
 public:
  static constexpr int kProducts = 2;  // of 64 rows each
  static constexpr uint32_t kQStep = 64 * kProducts * 128, kKStep = 0;
  using Dots = float[kProducts][C::kTileKeys / 2];

  __device__ __forceinline__ HeadMaxima(const IndexerParams& p, int group, int)
      : p_(p), first_row_(64 * kProducts * group + uniform(threadIdx.x % 128 / 32) * 16) {}

  __device__ __forceinline__ void look_up(int) const {}

  // `seen`: keys of this lane's query. `key`: the first one of the item.
  __device__ __forceinline__ void begin(int tile, int2 seen, int key, uint32_t) {
    first_query_ = tile * C::kQueries;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      Block& block = blocks_[n];
      const int query = row_of(n) / C::kHeads;
      const int low = __shfl_sync(kWholeWarp, seen.x, query);
      block.high = __shfl_sync(kWholeWarp, seen.y, query);
      block.number = key < low || key >= block.high ? -1 : (key - low) / p_.block_size;
      block.end = key >= block.high ? INT_MAX
                  : key < low       ? low
                                    : min(low + (block.number + 1) * p_.block_size, block.high);
      block.best = -INFINITY;
    }
  }

  // dots = Q K^T, of the rows of a warpgroup. k and q are low words of descriptors.
  static __device__ __forceinline__ void multiply(Dots& dots, uint32_t k, uint32_t q) {
    using Mma = Wgmma<typename C::T, C::kTileKeys, 0>;
#pragma unroll
    for (int i = 0; i < kProducts; ++i)
#pragma unroll
      for (int step = 0; step < C::kD / 16; ++step) {
        const int in_atom = step % 4 * 32, atom = step / 4;
        Mma::ss(dots[i], operand(q, ((atom * C::kQueryHeads + 64 * i) * 128 + in_atom) / 16),
                operand(k, (atom * C::kTileKeys * 128 + in_atom) / 16), step > 0);
      }
  }

  // Maxima of the key tile from `key` on, sixteen keys at a time.
  __device__ __forceinline__ void write(const Dots& dots, int key) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int step = 0; step < C::kTileKeys / 16; ++step) {
        const float* d = dots[n / 2] + 8 * step + 2 * (n % 2);
        float x[4] = {d[0], d[1], d[4], d[5]};
        const int behind = key + 16 * (step + 1);
        while (blocks_[n].end <= behind) {
          const int rest = blocks_[n].end - (behind - 16) - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (8 * (i / 2) + i % 2 < rest) {
              blocks_[n].best = max_nan(blocks_[n].best, x[i]);
              x[i] = -INFINITY;
            }
          next_block(n);
        }
        blocks_[n].best =
            max_nan(blocks_[n].best, max_nan(max_nan(x[0], x[1]), max_nan(x[2], x[3])));
      }
  }

  __device__ __forceinline__ void end() {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) next_block(n);
  }

 private:
  // The rows of a warp in a product are two octets. Those of an octet are heads of one query, so
  // all that follows but the maximum is the same in a warp.
  static constexpr int kOctets = 2 * kProducts;
  static_assert(C::kHeads % 8 == 0);

  struct Block {
    int number;  // -1 outside the keys that the query sees
    int end;     // the key behind its last one
    int high;    // the key behind the last one that the query sees
    float best;  // of this thread's keys so far
  };

  // The first row of an octet.
  __device__ __forceinline__ int row_of(int n) const { return first_row_ + n / 2 * 64 + n % 2 * 8; }

  // Writes the maximum of an octet's block.
  __device__ __forceinline__ void next_block(int n) {
    Block& block = blocks_[n];
    float best = max_nan(block.best, __shfl_xor_sync(kWholeWarp, block.best, 1));
    best = max_nan(best, __shfl_xor_sync(kWholeWarp, best, 2));
    const int row = row_of(n) + threadIdx.x % 32 / 4;
    const int query = first_query_ + row / C::kHeads, head = row % C::kHeads;
    if (block.number >= 0 && threadIdx.x % 4 == 0 && head < p_.heads)
      atomicMax(
          p_.ranks + (static_cast<int64_t>(query) * p_.heads + head) * p_.pitch + block.number,
          rank_of(best));
    block.best = -INFINITY;
    ++block.number;
    if (block.end < block.high) {
      block.end = min(block.end + p_.block_size, block.high);
    } else {
      block.number = -1;
      block.end = INT_MAX;
    }
  }

  const IndexerParams& p_;
  const int first_row_;  // of this warp in the tile
  int first_query_ = 0;
  Block blocks_[kOctets];
};

}  // namespace magi
