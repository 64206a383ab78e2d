// SPDX-License-Identifier: Apache-2.0
// Scores that are sums over heads: products have keys as rows and heads as columns, so a thread
// adds up the heads of a key in registers.
#pragma once

#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/indexer/params.h"
#include "ffa/sm90/indexer/rank.cuh"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

template <typename C>
class AddedHeads {
 public:
  static constexpr int kProducts = 1;
  static constexpr uint32_t kQStep = 0, kKStep = 64 * 128;  // bytes from one warpgroup to the other
  using Dots = float[kProducts][C::kQueryHeads / 2];

  __device__ __forceinline__ AddedHeads(const IndexerParams& p, int group, int first_tile)
      : p_(p),
        key_(group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        next_weight_(0.f) {
    look_up(first_tile);
  }

  // Reads early what the next tile needs: the weight of this thread's column.
  __device__ __forceinline__ void look_up(int tile) {
    weight_ = next_weight_;
    const int query = tile * C::kQueries + static_cast<int>(threadIdx.x) / C::kHeads;
    const int head = threadIdx.x % C::kHeads;
    const bool is_there = tile >= 0 && query < p_.num_queries && head < p_.heads;
    next_weight_ =
        is_there ? p_.weights[(static_cast<int64_t>(p_.first_query) + query) * p_.heads + head]
                 : 0.f;
  }

  // `seen`: keys of this lane's query. `weights`: shared memory for those of the tile.
  __device__ __forceinline__ void begin(int tile, int2 seen, int, uint32_t weights) {
    static_assert(C::kConsumers == C::kQueryHeads, "a thread brings the weight of one column");
    first_query_ = tile * C::kQueries;
    weights_ = weights;
    sts_int(weights + 4 * threadIdx.x, __float_as_int(weight_));
    named_barrier(1, C::kConsumers);
    if constexpr (C::kForm == IndexerForm::kBlocks) {
#pragma unroll
      for (int n = 0; n < kMine; ++n) {
        const int query = 4 * n + threadIdx.x % 4;
        seen_[n].x = __shfl_sync(kWholeWarp, seen.x, query);
        seen_[n].y = __shfl_sync(kWholeWarp, seen.y, query);
      }
    }
  }

  // dots = K Q^T, of the 64 keys of a warpgroup. k and q are low words of descriptors.
  static __device__ __forceinline__ void multiply(Dots& dots, uint32_t k, uint32_t q) {
    using Mma = Wgmma<typename C::T, C::kQueryHeads, 0>;
#pragma unroll
    for (int step = 0; step < C::kD / 16; ++step) {
      const int in_atom = step % 4 * 32, atom = step / 4;
      Mma::ss(dots[0], operand(k, (atom * C::kTileKeys * 128 + in_atom) / 16),
              operand(q, (atom * C::kQueryHeads * 128 + in_atom) / 16), step > 0);
    }
  }

  // Scores of the key tile from `key` on.
  __device__ __forceinline__ void write(const Dots& dots, int key) const {
    if (p_.heads == C::kHeads)
      add_and_write<false>(dots[0], key + key_);
    else
      add_and_write<true>(dots[0], key + key_);
  }

  __device__ __forceinline__ void end() const {}

 private:
  static constexpr int kMine = C::kQueries / 4;  // queries whose sums a thread writes

  // Adds up the heads of two keys for each query. Padded heads are left out, because an infinite
  // key makes their dots NaN.
  template <bool kIsPadded>
  __device__ __forceinline__ void add_and_write(const float (&dots)[C::kQueryHeads / 2],
                                                int key) const {
    constexpr int kOctets = C::kHeads / 8;  // of the columns of a query
    const int quarter = threadIdx.x % 4;
    const int heads = p_.heads - 2 * quarter;  // from this thread's first one on
#pragma unroll
    for (int i = 0; i < C::kQueries; ++i) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int j = i * kOctets; j < (i + 1) * kOctets; ++j) {
        const float2 w = lds_float2(weights_ + 4 * (8 * j + 2 * quarter));
        const int head = 8 * (j - i * kOctets);
        const bool is_padded_a = kIsPadded && head >= heads;
        const bool is_padded_b = kIsPadded && head + 1 >= heads;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // NaN stays NaN.
          const float a = dots[4 * j + 2 * r], b = dots[4 * j + 2 * r + 1];
          sums[r] = fmaf(a < 0.f || is_padded_a ? 0.f : a, w.x, sums[r]);
          sums[r] = fmaf(b < 0.f || is_padded_b ? 0.f : b, w.y, sums[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r] += __shfl_xor_sync(kWholeWarp, sums[r], 1);
        sums[r] += __shfl_xor_sync(kWholeWarp, sums[r], 2);
      }
      if (quarter == i % 4) write_sums(i, sums, key);
    }
  }

  // Sums of query i of the tile, for `key` and the eighth behind it.
  __device__ __forceinline__ void write_sums(int i, const float (&sums)[2], int key) const {
    const int64_t row = (first_query_ + i) * p_.pitch;
    if constexpr (C::kForm == IndexerForm::kBlocks) {
      const int2 seen = seen_[i / 4];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (key + 8 * r >= seen.x && key + 8 * r < seen.y)
          atomicMax(p_.ranks + row + (key + 8 * r - seen.x) / p_.block_size, rank_of(sums[r]));
    } else if (first_query_ + i < p_.num_queries) {
      p_.scores[row + key] = sums[0];
      p_.scores[row + key + 8] = sums[1];
    }
  }

  const IndexerParams& p_;
  const int key_;  // of this thread's first row in a key tile
  int first_query_ = 0;
  uint32_t weights_ = 0;
  float weight_, next_weight_;
  int2 seen_[kMine];  // of the queries whose sums this thread writes
};

}  // namespace magi
