// SPDX-License-Identifier: Apache-2.0
// What the row kernels share: how threads walk rows, lists of rows, loads and stores of one vector.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "ffa/common/host.h"
#include "magi/rows.h"

namespace magi {
namespace rows {

constexpr int kThreads = 256;
constexpr int kPiece = 1024;          // vectors of a row that one block walks
constexpr int kBlocksPerSm = 16;      // of the grid at most; more rows are walked in a loop
constexpr int kRangeBlocksPerSm = 8;  // fewer, because each of them reads all ranges first

// Thread t takes vectors t % lanes, + lanes, ... of rows t / lanes, + slots, ... of a chunk, slots
// being kThreads / lanes. Long rows are cut into pieces of kPiece vectors, so that a few of them
// keep the GPU busy too.
struct Walk {
  int32_t vectors, log_lanes, pieces, rows_per_chunk;
  int64_t num_chunks;
};

inline Walk make_walk(int64_t num_rows, int64_t vectors, int rows_per_thread, bool is_cut) {
  // The most lanes of which no more than an eighth idle; down to 8, which read whole sectors of 32
  // bytes and more.
  int log_lanes = 0;
  while ((1 << log_lanes) < vectors && (1 << log_lanes) < kThreads) ++log_lanes;
  for (int log = log_lanes; log >= 3; --log) {
    const int64_t lanes = 1 << log, turns = (vectors + lanes - 1) / lanes;
    if (turns * lanes * 8 <= vectors * 9) {
      log_lanes = log;
      break;
    }
  }
  Walk walk;
  walk.vectors = static_cast<int32_t>(vectors);
  walk.log_lanes = log_lanes;
  walk.pieces = is_cut ? static_cast<int32_t>((vectors + kPiece - 1) / kPiece) : 1;
  walk.rows_per_chunk = (kThreads >> log_lanes) * rows_per_thread;
  walk.num_chunks = (num_rows + walk.rows_per_chunk - 1) / walk.rows_per_chunk * walk.pieces;
  return walk;
}

// Where one thread stands in a chunk.
struct Place {
  int64_t row;     // first row of the thread, counted in the list; then every `slots`
  int begin, end;  // vectors, every 1 << log_lanes
};

__device__ __forceinline__ Place place_in(const Walk& walk, int64_t chunk) {
  const int lane = threadIdx.x & ((1 << walk.log_lanes) - 1), slot = threadIdx.x >> walk.log_lanes;
  if (walk.pieces == 1) return {chunk * walk.rows_per_chunk + slot, lane, walk.vectors};
  const int64_t group = chunk / walk.pieces;
  const int first = static_cast<int>(chunk - group * walk.pieces) * kPiece;
  return {group * walk.rows_per_chunk + slot, first + lane, min(walk.vectors, first + kPiece)};
}

// The ranges of one block, in shared memory, laid out so that a row is found in them by bisection.
struct RangeTable {
  int32_t start[MAGI_ROW_RANGES];
  int32_t
      before[MAGI_ROW_RANGES + 1];  // rows of all ranges before; the last one is the number of rows
  int32_t warp_sums[kThreads / 32];
};

template <typename T>
__device__ void fill_table(RangeTable& table, const T* ranges, int count) {
  constexpr int kEach = MAGI_ROW_RANGES / kThreads;
  const int first = threadIdx.x * kEach, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = 0, own[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = sum;
    if (first + i < count) {
      const T begin = ranges[2 * (first + i)], end = ranges[2 * (first + i) + 1];
      table.start[first + i] = static_cast<int32_t>(begin);
      sum += max(0, static_cast<int32_t>(end - begin));
    }
  }
  int upto = sum;  // of this thread and those below it in the warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) table.warp_sums[warp] = upto;
  __syncthreads();
  int base = upto - sum;
  for (int w = 0; w < warp; ++w) base += table.warp_sums[w];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (first + i <= count) table.before[first + i] = base + own[i];
  if (threadIdx.x == kThreads - 1 && count == MAGI_ROW_RANGES) table.before[count] = base + sum;
  __syncthreads();
}

// Kernels for lists of row numbers have no table.
struct NoTable {};
template <bool kHasRanges>
using TableOf = std::conditional_t<kHasRanges, RangeTable, NoTable>;

__device__ __forceinline__ void load_table(RangeTable& table, const magi_row_list& list) {
  if (list.kind == MAGI_RANGES_INT32)
    fill_table(table, static_cast<const int32_t*>(list.data), list.count);
  if (list.kind == MAGI_RANGES_INT64)
    fill_table(table, static_cast<const int64_t*>(list.data), list.count);
}

// Row number i of the list, whose ranges, if that is what it holds, are in `table`. `range` is -1
// at first, then that of an i before: to walk on from there is shorter than to look again.
__device__ __forceinline__ int64_t row_at(const magi_row_list& list, int64_t i, const NoTable&,
                                          int&) {
  return list.kind == MAGI_ROWS_ALL ? i : static_cast<const int32_t*>(list.data)[i];
}

__device__ __forceinline__ int64_t row_at(const magi_row_list& list, int64_t i,
                                          const RangeTable& table, int& range) {
  if (list.kind < MAGI_RANGES_INT32) return row_at(list, i, NoTable{}, range);
  const int row = static_cast<int>(i);
  if (range < 0) {
    range = 0;  // becomes the last one with before[range] <= row; empty ones come before it
    for (int high = list.count - 1; range < high;) {
      const int middle = (range + high + 1) / 2;
      if (table.before[middle] <= row)
        range = middle;
      else
        high = middle - 1;
    }
  }
  while (table.before[range + 1] <= row) ++range;
  return static_cast<int64_t>(table.start[range]) + (row - table.before[range]);
}

// The type of so many bytes: 1, 2, 4, 8 or 16.
template <int kBytes>
struct Bytes {
  using Word =
      std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
  using type =
      std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, Word>>;
};

// kElements values of a row, 16 bytes at a time where there are as many.
template <typename T, int kElements>
__device__ __forceinline__ void load_raw(const void* from, T (&raw)[kElements]) {
  constexpr int kBytes = kElements * sizeof(T), kStep = kBytes < 16 ? kBytes : 16;
  using Vector = typename Bytes<kStep>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kStep; ++i)
    reinterpret_cast<Vector*>(raw)[i] = static_cast<const Vector*>(from)[i];
}

// The same as float.
template <typename T, int kElements>
__device__ __forceinline__ void load_floats(const void* from, float (&x)[kElements]) {
  alignas(16) T raw[kElements];
  load_raw<T, kElements>(from, raw);
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = static_cast<float>(raw[i]);
}

template <typename T, int kElements>
__device__ __forceinline__ void store_floats(void* to, const float (&x)[kElements]) {
  constexpr int kBytes = kElements * sizeof(T), kStep = kBytes < 16 ? kBytes : 16;
  using Vector = typename Bytes<kStep>::type;
  alignas(16) T raw[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) raw[i] = static_cast<T>(x[i]);
#pragma unroll
  for (int i = 0; i < kBytes / kStep; ++i)
    static_cast<Vector*>(to)[i] = reinterpret_cast<const Vector*>(raw)[i];
}

// Bits that are zero in all of them tell the alignment that all share.
inline uint64_t bits_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline uint64_t bits_of(const magi_row_part& part) {
  return bits_of(part.in) | bits_of(part.out) |
         static_cast<uint64_t>(part.in_stride | part.out_stride);
}
// Those of all parts, and of the bytes in a row, an element having `element_bytes`.
template <typename Params>
uint64_t bits_of_parts(const Params& p, int element_bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < p.num_parts; ++i)
    bits |= bits_of(p.part[i]) | static_cast<uint64_t>(element_bytes * p.part[i].elements);
  return bits;
}

// Sets how each part is walked, in vectors and so many rows at a time; the chunks of the longest.
template <typename Args, typename Params>
int64_t walk_parts(Args& args, const Params& p, int elements_per_vector, int rows_at_a_time) {
  int64_t num_chunks = 0;
  for (int i = 0; i < p.num_parts; ++i) {
    const magi_row_part& part = p.part[i];
    const Walk walk =
        make_walk(p.num_rows, part.elements / elements_per_vector, rows_at_a_time, true);
    args.part[i] = {walk, part.in_stride, part.out_stride, static_cast<const char*>(part.in),
                    static_cast<char*>(part.out)};
    num_chunks = std::max(num_chunks, walk.num_chunks);
  }
  return num_chunks;
}

inline int blocks_for(int64_t num_chunks, int multiprocessor_count,
                      int blocks_per_sm = kBlocksPerSm) {
  const int64_t most = static_cast<int64_t>(multiprocessor_count) * blocks_per_sm;
  return static_cast<int>(std::max<int64_t>(1, std::min(num_chunks, most)));
}

inline magi_status check_rows(int32_t version, int64_t num_rows) {
  if (version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT, "The parameters are of ABI version %d, the library of %d.",
                version, MAGI_ABI_VERSION);
  if (num_rows < 0 || num_rows >= (int64_t{1} << 31))
    return fail(MAGI_INVALID_ARGUMENT, "%lld rows; a list has fewer than 2**31.",
                static_cast<long long>(num_rows));
  return MAGI_OK;
}

inline magi_status check_part(const magi_row_part& part) {
  if (part.elements < 1 || part.elements >= (int64_t{1} << 31))
    return fail(MAGI_INVALID_ARGUMENT, "A row of %lld elements; it has 1 to 2**31 - 1.",
                static_cast<long long>(part.elements));
  return MAGI_OK;
}

// The same for a call on several parts: its version, its rows, and one dtype for all parts.
template <typename Params>
magi_status check_parts(const Params& p) {
  MAGI_RETURN(check_rows(p.version, p.num_rows));
  const int32_t num_parts = p.num_parts;
  const magi_row_part* parts = p.part;
  if (num_parts < 1 || num_parts > MAGI_ROW_PARTS)
    return fail(MAGI_INVALID_ARGUMENT, "%d parts; a call takes 1 to %d.", num_parts,
                MAGI_ROW_PARTS);
  for (int i = 0; i < num_parts; ++i) MAGI_RETURN(check_part(parts[i]));
  for (int i = 1; i < num_parts; ++i)
    if (parts[i].in_dtype != parts[0].in_dtype || parts[i].out_dtype != parts[0].out_dtype)
      return fail(MAGI_INVALID_ARGUMENT,
                  "Part %d has other dtypes than part 0; give them to another call.", i);
  return MAGI_OK;
}

template <typename T>
using Pointee = std::remove_pointer_t<T>;

// Calls `run` with a null pointer to the type of `dtype`; `what` is a sentence with a %d for one
// that is not there.
template <typename Run>
magi_status with_float_type(int32_t dtype, const char* what, Run run) {
  if (dtype == MAGI_BF16) return run(static_cast<__nv_bfloat16*>(nullptr));
  if (dtype == MAGI_FP16) return run(static_cast<__half*>(nullptr));
  if (dtype == MAGI_FP32) return run(static_cast<float*>(nullptr));
  return fail(MAGI_UNSUPPORTED, what, dtype);
}

inline magi_status check_list(const magi_row_list& list) {
  const bool is_range = list.kind == MAGI_RANGES_INT32 || list.kind == MAGI_RANGES_INT64;
  if (list.kind < MAGI_ROWS_ALL || list.kind > MAGI_RANGES_INT64)
    return fail(MAGI_INVALID_ARGUMENT, "%d is no kind of row list.", list.kind);
  if (is_range && (list.count < 0 || list.count > MAGI_ROW_RANGES))
    return fail(MAGI_CAPACITY, "%d ranges; a list has at most %d.", list.count, MAGI_ROW_RANGES);
  return MAGI_OK;
}

__host__ __device__ inline bool is_ranges(const magi_row_list& list) {
  return list.kind >= MAGI_RANGES_INT32;
}

}  // namespace rows
}  // namespace magi
