// SPDX-License-Identifier: Apache-2.0
// Gather and scatter of rows, of up to four tensors in one launch; on request float32 to 16 bits on
// the way.
#include "range_ops/rows.cuh"

namespace magi {
namespace rows {

struct CopyPart {
  Walk walk;
  int64_t in_stride, out_stride;
  const char* in;
  char* out;
};

struct CopyArgs {
  int64_t num_rows;
  magi_row_list in_rows, out_rows;
  CopyPart part[MAGI_ROW_PARTS];
};

// How one vector moves: as it is, or rounded. kRows vectors of a thread are in flight at once.
template <int kBytes>
struct AsIs {
  static constexpr int kIn = kBytes, kOut = kBytes, kRows = 4;
  typename Bytes<kBytes>::type x;
  __device__ __forceinline__ void load(const char* from) {
    x = *reinterpret_cast<const decltype(x)*>(from);
  }
  __device__ __forceinline__ void store(char* to) const { *reinterpret_cast<decltype(x)*>(to) = x; }
};

template <typename T, int kElements>
struct Rounded {
  static constexpr int kIn = 4 * kElements, kOut = 2 * kElements, kRows = 2;
  float x[kElements];
  __device__ __forceinline__ void load(const char* from) { load_floats<float, kElements>(from, x); }
  __device__ __forceinline__ void store(char* to) const { store_floats<T, kElements>(to, x); }
};

template <typename Move, bool kHasRanges>
__global__ void __launch_bounds__(kThreads, 4) copy_rows(const __grid_constant__ CopyArgs args) {
  __shared__ TableOf<kHasRanges> table;
  int64_t num_rows = args.num_rows;
  if constexpr (kHasRanges) {
    const magi_row_list& ranges = is_ranges(args.in_rows) ? args.in_rows : args.out_rows;
    load_table(table, ranges);
    num_rows = min(num_rows, static_cast<int64_t>(table.before[ranges.count]));
  }
  const CopyPart& part = args.part[blockIdx.y];
  const int lanes = 1 << part.walk.log_lanes, slots = kThreads >> part.walk.log_lanes;
  for (int64_t chunk = blockIdx.x; chunk < part.walk.num_chunks; chunk += gridDim.x) {
    const Place at = place_in(part.walk, chunk);
    const char* from[Move::kRows];
    char* to[Move::kRows];
    int range = -1;
#pragma unroll
    for (int u = 0; u < Move::kRows; ++u) {
      const int64_t i = at.row + u * slots;
      from[u] = nullptr;
      if (i < num_rows) {
        from[u] = part.in + row_at(args.in_rows, i, table, range) * part.in_stride;
        to[u] = part.out + row_at(args.out_rows, i, table, range) * part.out_stride;
      }
    }
    for (int v = at.begin; v < at.end; v += lanes) {
      Move x[Move::kRows];
#pragma unroll
      for (int u = 0; u < Move::kRows; ++u)
        if (from[u] != nullptr) x[u].load(from[u] + int64_t{v} * Move::kIn);
#pragma unroll
      for (int u = 0; u < Move::kRows; ++u)
        if (from[u] != nullptr) x[u].store(to[u] + int64_t{v} * Move::kOut);
    }
  }
}

template <typename Move>
magi_status launch_copy(const magi_row_copy_params& p, int elements_per_vector) {
  CopyArgs args;
  args.num_rows = p.num_rows;
  args.in_rows = p.in_rows;
  args.out_rows = p.out_rows;
  const int64_t num_chunks = walk_parts(args, p, elements_per_vector, Move::kRows);
  int count = 0;
  MAGI_RETURN(multiprocessors(&count));
  const bool has_ranges = is_ranges(p.in_rows) || is_ranges(p.out_rows);
  const dim3 grid(blocks_for(num_chunks, count, has_ranges ? kRangeBlocksPerSm : kBlocksPerSm),
                  p.num_parts);
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  if (has_ranges)
    copy_rows<Move, true><<<grid, kThreads, 0, stream>>>(args);
  else
    copy_rows<Move, false><<<grid, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "launching a copy of rows");
}

magi_status copy_as_is(const magi_row_copy_params& p) {
  const uint64_t bits = bits_of_parts(p, 1);
  if (bits % 16 == 0) return launch_copy<AsIs<16>>(p, 16);
  if (bits % 8 == 0) return launch_copy<AsIs<8>>(p, 8);
  if (bits % 4 == 0) return launch_copy<AsIs<4>>(p, 4);
  if (bits % 2 == 0) return launch_copy<AsIs<2>>(p, 2);
  return launch_copy<AsIs<1>>(p, 1);
}

template <typename T>
magi_status copy_rounded(const magi_row_copy_params& p) {
  return bits_of_parts(p, 2) % 16 == 0 ? launch_copy<Rounded<T, 8>>(p, 8)
                                       : launch_copy<Rounded<T, 1>>(p, 1);
}

magi_status copy(const magi_row_copy_params& p) {
  MAGI_RETURN(check_parts(p));
  MAGI_RETURN(check_list(p.in_rows));
  MAGI_RETURN(check_list(p.out_rows));
  if (is_ranges(p.in_rows) && is_ranges(p.out_rows))
    return fail(MAGI_INVALID_ARGUMENT, "Both lists are ranges; give row numbers on one side.");
  if (p.num_rows == 0) return MAGI_OK;
  const int32_t in = p.part[0].in_dtype, out = p.part[0].out_dtype;
  if (in == MAGI_RAW && out == MAGI_RAW) return copy_as_is(p);
  if (in == MAGI_FP32 && out == MAGI_BF16) return copy_rounded<__nv_bfloat16>(p);
  if (in == MAGI_FP32 && out == MAGI_FP16) return copy_rounded<__half>(p);
  return fail(MAGI_UNSUPPORTED,
              "Rows are copied as bytes or from float32 to 16 bits, not from dtype %d to %d.", in,
              out);
}

}  // namespace rows
}  // namespace magi

extern "C" magi_status magi_row_copy(const magi_row_copy_params* params) {
  return magi::rows::copy(*params);
}
