// SPDX-License-Identifier: Apache-2.0
// Attention dropout: which pairs of query and key stay (magi_dropout in magi/abi.h). Accumulator
// fragments as in common/scores.cuh: value 4j + 2r + b is in row r and column 8j + 2q + b of a
// lane.
#pragma once

#include <cstdint>

#include "magi/abi.h"

namespace magi {

// The finaliser of MurmurHash3: a bijection of 32 bits in which each bit of the result depends on
// all bits of x.
__device__ __forceinline__ uint32_t mix_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// Rows beyond the last one have no pairs, so any hash does.
__device__ __forceinline__ uint32_t dropout_q_hash(const magi_dropout& d, int row, int total_q,
                                                   int head) {
  const int position = __ldg(d.q_positions + min(max(row, 0), total_q - 1));
  return mix_bits(mix_bits(position ^ d.seed_q) ^ mix_bits(head ^ d.seed_head));
}

__device__ __forceinline__ uint32_t dropout_k_hash(const magi_dropout& d, int row, int total_k) {
  return mix_bits(__ldg(d.k_positions + min(max(row, 0), total_k - 1)) ^ d.seed_k);
}

__device__ __forceinline__ bool stays(const magi_dropout& d, uint32_t q_hash, uint32_t k_hash) {
  uint32_t x = (q_hash ^ k_hash) * 0x85ebca6bu;
  x = (x ^ x >> 15) * 0xc2b2ae35u;
  return x >= d.threshold;
}

// Bit i % 32 of word i / 32: value i stays. Loops are unrolled by four only, for want of registers.
template <int kColumns>
struct Staying {
  uint32_t words[(kColumns + 63) / 64] = {};

  __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> (i % 32) & 1; }

  // The bits of values 4j + 2r + b for columns b.
  __device__ __forceinline__ void add(int j, uint32_t bits) {
    if (kColumns <= 64 || j < 8)
      words[0] |= bits << (4 * j % 32);
    else
      words[kColumns > 64] |= bits << (4 * j % 32);
  }
};

// `hash_of` takes a column, `is_in` one of the two rows and what `hash_of` gave.
template <int kColumns, typename HashOf, typename IsIn>
__device__ __forceinline__ Staying<kColumns> staying_columns(int lane, HashOf hash_of, IsIn is_in) {
  Staying<kColumns> staying;
#pragma unroll 4
  for (int j = 0; j < kColumns / 8; ++j) {
    uint32_t bits = 0;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t hash = hash_of(8 * j + 2 * (lane % 4) + b);
#pragma unroll
      for (int r = 0; r < 2; ++r) bits |= is_in(r, hash) << (2 * r + b);
    }
    staying.add(j, bits);
  }
  return staying;
}

// Forward: rows are queries, the first column is key k0.
template <int kBlockN>
__device__ __forceinline__ Staying<kBlockN> staying_keys(const magi_dropout& d,
                                                         const uint32_t (&q_hashes)[2], int k0,
                                                         int total_k, int lane) {
  return staying_columns<kBlockN>(
      lane, [&](int column) { return dropout_k_hash(d, k0 + column, total_k); },
      [&](int r, uint32_t k_hash) { return stays(d, q_hashes[r], k_hash); });
}

// Backward: rows are keys, the first column is query q0.
template <int kQueries>
__device__ __forceinline__ Staying<kQueries> staying_queries(const magi_dropout& d,
                                                             const uint32_t (&k_hashes)[2], int q0,
                                                             int total_q, int head, int lane) {
  return staying_columns<kQueries>(
      lane, [&](int column) { return dropout_q_hash(d, q0 + column, total_q, head); },
      [&](int r, uint32_t q_hash) { return stays(d, q_hash, k_hashes[r]); });
}

// All bits of two neighbouring values in 16 bits, those from `first` on.
template <int kColumns>
__device__ __forceinline__ uint32_t pair_mask(const Staying<kColumns>& staying, int first) {
  return (staying.has(first) ? 0xffffu : 0u) | (staying.has(first + 1) ? 0xffff0000u : 0u);
}

}  // namespace magi
