// SPDX-License-Identifier: Apache-2.0
// Rows set to one value.
#include "range_ops/rows.cuh"

namespace magi {
namespace rows {

constexpr int kFillRowsPerThread = 4;

struct FillArgs {
  Walk walk;
  int64_t num_rows, stride;
  magi_row_list rows;
  uint64_t value;  // repeated until it fills 8 bytes
  char* out;
};

template <int kBytes, bool kHasRanges>
__global__ void __launch_bounds__(kThreads) fill_rows(const __grid_constant__ FillArgs args) {
  __shared__ TableOf<kHasRanges> table;
  int64_t num_rows = args.num_rows;
  if constexpr (kHasRanges) {
    load_table(table, args.rows);
    num_rows = min(num_rows, static_cast<int64_t>(table.before[args.rows.count]));
  }
  using Vector = typename Bytes<kBytes>::type;
  const uint64_t words[2] = {args.value, args.value};
  Vector x;
  memcpy(&x, words, kBytes);
  const int lanes = 1 << args.walk.log_lanes, slots = kThreads >> args.walk.log_lanes;
  for (int64_t chunk = blockIdx.x; chunk < args.walk.num_chunks; chunk += gridDim.x) {
    const Place at = place_in(args.walk, chunk);
    int range = -1;
#pragma unroll
    for (int u = 0; u < kFillRowsPerThread; ++u) {
      const int64_t i = at.row + u * slots;
      if (i >= num_rows) break;
      Vector* to =
          reinterpret_cast<Vector*>(args.out + row_at(args.rows, i, table, range) * args.stride);
      for (int v = at.begin; v < at.end; v += lanes) to[v] = x;
    }
  }
}

template <int kBytes>
magi_status launch_fill(const magi_row_fill_params& p) {
  FillArgs args;
  args.walk = make_walk(p.num_rows, p.row_bytes / kBytes, kFillRowsPerThread, true);
  args.num_rows = p.num_rows;
  args.stride = p.stride;
  args.rows = p.rows;
  args.value = p.value;
  for (int have = p.value_bytes; have < 8; have *= 2) args.value |= args.value << (8 * have);
  args.out = static_cast<char*>(p.out);
  int count = 0;
  MAGI_RETURN(multiprocessors(&count));
  const int grid =
      blocks_for(args.walk.num_chunks, count, is_ranges(p.rows) ? kRangeBlocksPerSm : kBlocksPerSm);
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  if (is_ranges(p.rows))
    fill_rows<kBytes, true><<<grid, kThreads, 0, stream>>>(args);
  else
    fill_rows<kBytes, false><<<grid, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "launching a fill of rows");
}

magi_status fill(const magi_row_fill_params& p) {
  MAGI_RETURN(check_rows(p.version, p.num_rows));
  MAGI_RETURN(check_list(p.rows));
  const int size = p.value_bytes;
  if (size != 1 && size != 2 && size != 4 && size != 8)
    return fail(MAGI_INVALID_ARGUMENT, "A value of %d bytes; it has 1, 2, 4 or 8.", size);
  const bool is_whole = p.row_bytes > 0 && p.row_bytes % size == 0;
  if (!is_whole || (size < 8 && p.value >> (8 * size) != 0) || p.row_bytes >= (int64_t{1} << 31))
    return fail(MAGI_INVALID_ARGUMENT,
                "A row of %lld bytes and a value of %d; give whole values, and no other bits.",
                static_cast<long long>(p.row_bytes), size);
  const uint64_t bits = bits_of(p.out) | static_cast<uint64_t>(p.stride | p.row_bytes);
  if (bits % size != 0)
    return fail(MAGI_INVALID_ARGUMENT, "Rows do not start at multiples of %d bytes.", size);
  if (p.num_rows == 0) return MAGI_OK;
  if (bits % 16 == 0) return launch_fill<16>(p);
  if (bits % 8 == 0) return launch_fill<8>(p);
  if (bits % 4 == 0) return launch_fill<4>(p);
  if (bits % 2 == 0) return launch_fill<2>(p);
  return launch_fill<1>(p);
}

}  // namespace rows
}  // namespace magi

extern "C" magi_status magi_row_fill(const magi_row_fill_params* params) {
  return magi::rows::fill(*params);
}
