// SPDX-License-Identifier: Apache-2.0
// Sums of rows of several ranks, in float32 in the order of the ranks: eight values at a time, of
// any dtype that travels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "magi/abi.h"

namespace magi {
inline namespace accumulating {

__device__ __forceinline__ void unpack(uint32_t word, int dtype, float* to) {
  if (dtype == MAGI_BF16) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    to[0] = pair.x;
    to[1] = pair.y;
  }
}

__device__ __forceinline__ uint32_t pack(float a, float b, int dtype) {
  if (dtype == MAGI_BF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight values as they lie in memory: loads of several are begun before the first is used. Past the
// first cache, as other GPUs wrote them.
template <bool kIsFloat>
struct Eight;

template <>
struct Eight<true> {
  float4 a, b;
  __device__ __forceinline__ void load(const void* from) {
    a = __ldcs(static_cast<const float4*>(from));
    b = __ldcs(static_cast<const float4*>(from) + 1);
  }
  __device__ __forceinline__ void add_to(float (&sum)[8], int) const {
    const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
  }
};

template <>
struct Eight<false> {
  uint4 words;
  __device__ __forceinline__ void load(const void* from) {
    words = __ldcs(static_cast<const uint4*>(from));
  }
  __device__ __forceinline__ void add_to(float (&sum)[8], int dtype) const {
    float x[8];
    unpack(words.x, dtype, x);
    unpack(words.y, dtype, x + 2);
    unpack(words.z, dtype, x + 4);
    unpack(words.w, dtype, x + 6);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
  }
};

__device__ __forceinline__ int value_bytes(int dtype) { return dtype == MAGI_FP32 ? 4 : 2; }

__device__ __forceinline__ void load_sum(float (&sum)[8], const void* base, int64_t at, int dtype) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.f;
  if (base == nullptr) return;
  const char* from = static_cast<const char*>(base) + at * value_bytes(dtype);
  if (dtype == MAGI_FP32) {
    Eight<true> x;
    x.load(from);
    x.add_to(sum, dtype);
  } else {
    Eight<false> x;
    x.load(from);
    x.add_to(sum, dtype);
  }
}

__device__ __forceinline__ void store_sum(const float (&x)[8], void* to, int64_t at, int dtype) {
  if (dtype == MAGI_FP32) {
    float4* target = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
    target[0] = make_float4(x[0], x[1], x[2], x[3]);
    target[1] = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + at) =
      make_uint4(pack(x[0], x[1], dtype), pack(x[2], x[3], dtype), pack(x[4], x[5], dtype),
                 pack(x[6], x[7], dtype));
}

// The rows of one tensor: out = base + what each rank adds. What rank `rank` adds lies at `own`,
// rows `own_stride` bytes apart; what others add lies at `data`, one after another.
struct ReducedTensor {
  const char *data, *own;
  const void* base;
  void* out;
  int64_t own_stride;
  int32_t row_values;
};
struct ReducedRows {
  const int32_t* src_rows;  // (world, rows)
  int32_t rows, world, rank, wire_dtype, base_dtype, out_dtype;
};

// Where the rows of a rank lie, and how many bytes they are apart.
struct RankRows {
  const char* at;
  int64_t stride;
};
template <bool kIsFloat>
__device__ __forceinline__ RankRows rows_of_rank(const ReducedRows& p, const ReducedTensor& t,
                                                 int rank) {
  if (rank == p.rank && t.own != nullptr) return {t.own, t.own_stride};
  return {t.data, t.row_values * (kIsFloat ? 4ll : 2ll)};
}

// By a warp: so many times eight values of a row in each lane, as far as it has them, from
// `column`, counted in eights, on; to row `to` of out.
template <int kChunks, bool kIsFloat>
__device__ __forceinline__ void sum_part(const ReducedRows& p, const ReducedTensor& t, int row,
                                         int column, int to) {
  const int left = t.row_values / 8 - column;  // in steps of 32
  const int64_t at = static_cast<int64_t>(row) * t.row_values + 8 * column;
  float sum[kChunks][8];
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    if (32 * i < left) load_sum(sum[i], t.base, at + 256 * i, p.base_dtype);
#pragma unroll 1
  for (int rank = 0; rank < p.world; ++rank) {
    const int src_row = __ldg(p.src_rows + static_cast<int64_t>(rank) * p.rows + row);
    if (src_row < 0) continue;
    const RankRows rows = rows_of_rank<kIsFloat>(p, t, rank);
    const char* from = rows.at + src_row * rows.stride + column * (kIsFloat ? 32 : 16);
    Eight<kIsFloat> x[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (32 * i < left) x[i].load(from + i * (kIsFloat ? 1024 : 512));
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (32 * i < left) x[i].add_to(sum[i], p.wire_dtype);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    if (32 * i < left)
      store_sum(sum[i], t.out, static_cast<int64_t>(to) * t.row_values + 8 * column + 256 * i,
                p.out_dtype);
}

// By a warp: a few short rows, a lane eight values of one of them.
template <bool kIsFloat>
__device__ __forceinline__ void sum_short_rows(const ReducedRows& p, const ReducedTensor& t,
                                               int first, int rows) {
  const int per_row = t.row_values / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < rows * per_row; i += 32)
    sum_part<1, kIsFloat>(p, t, first + i / per_row, i % per_row, first + i / per_row);
}

constexpr int kShortRow = 512;  // values, below which a warp has several

// Rows of a warp at a time.
__host__ __device__ constexpr int rows_of_warp(int row_values) {
  return row_values < kShortRow ? 2 * kShortRow / row_values : 1;
}

// By a warp.
template <bool kIsFloat>
__device__ __forceinline__ void sum_rows_of(const ReducedRows& p, const ReducedTensor& t, int first,
                                            int rows) {
  if (t.row_values < kShortRow) return sum_short_rows<kIsFloat>(p, t, first, rows);
  constexpr int kChunks = kIsFloat ? 2 : 4;
#pragma unroll 1
  for (int row = first; row < first + rows; ++row)
#pragma unroll 1
    for (int column = threadIdx.x % 32; column < t.row_values / 8; column += 32 * kChunks)
      sum_part<kChunks, kIsFloat>(p, t, row, column, row);
}

__device__ __forceinline__ void sum_rows(const ReducedRows& p, const ReducedTensor& t, int first,
                                         int rows) {
  if (p.wire_dtype == MAGI_FP32)
    sum_rows_of<true>(p, t, first, rows);
  else
    sum_rows_of<false>(p, t, first, rows);
}

}  // namespace accumulating
}  // namespace magi
