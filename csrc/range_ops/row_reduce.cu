// SPDX-License-Identifier: Apache-2.0
// Sum or mean of rows, by who owns the result: no atomics, one order, so the same bits on every
// run.
#include "range_ops/rows.cuh"

namespace magi {
namespace rows {

struct ReducePart {
  Walk walk;
  int64_t in_stride, out_stride;
  const char* in;
  char* out;
};

struct ReduceArgs {
  int64_t num_rows;
  int32_t accumulate, average;
  const int32_t *rows, *begin, *sources;
  ReducePart part[MAGI_ROW_PARTS];
};

template <typename In, typename Out, int kElements>
__global__ void __launch_bounds__(kThreads, 5)
    reduce_rows(const __grid_constant__ ReduceArgs args) {
  const ReducePart& part = args.part[blockIdx.y];
  const int lanes = 1 << part.walk.log_lanes;
  for (int64_t chunk = blockIdx.x; chunk < part.walk.num_chunks; chunk += gridDim.x) {
    const Place at = place_in(part.walk, chunk);
    if (at.row >= args.num_rows) continue;
    const int first = args.begin[at.row], last = args.begin[at.row + 1];
    const int64_t row = args.rows == nullptr ? at.row : args.rows[at.row];
    char* const out_row = part.out + row * part.out_stride;
    const float terms = static_cast<float>(max(1, last - first + args.accumulate));
    for (int v = at.begin; v < at.end; v += lanes) {
      const int64_t element = int64_t{v} * kElements;
      float sum[kElements];
      if (args.accumulate) {
        load_floats<Out, kElements>(out_row + element * sizeof(Out), sum);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = 0.f;
      }
      for (int j = first; j < last; ++j) {
        float x[kElements];
        load_floats<In, kElements>(
            part.in + args.sources[j] * part.in_stride + element * sizeof(In), x);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] += x[i];
      }
      if (args.average) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = __fdiv_rn(sum[i], terms);
      }
      store_floats<Out, kElements>(out_row + element * sizeof(Out), sum);
    }
  }
}

template <typename In, typename Out, int kElements>
magi_status launch_reduce(const magi_row_reduce_params& p) {
  ReduceArgs args;
  args.num_rows = p.num_rows;
  args.accumulate = p.accumulate;
  args.average = p.average;
  args.rows = p.rows;
  args.begin = p.begin;
  args.sources = p.sources;
  const int64_t num_chunks = walk_parts(args, p, kElements, 1);
  int count = 0;
  MAGI_RETURN(multiprocessors(&count));
  const dim3 grid(blocks_for(num_chunks, count), p.num_parts);
  reduce_rows<In, Out, kElements><<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(args);
  return cuda_status(cudaGetLastError(), "launching a sum of rows");
}

template <typename In, typename Out>
magi_status reduce_as(const magi_row_reduce_params& p) {
  // Eight elements are at least 16 bytes.
  return bits_of_parts(p, 2) % 16 == 0 ? launch_reduce<In, Out, 8>(p)
                                       : launch_reduce<In, Out, 1>(p);
}

template <typename In>
magi_status reduce_from(const magi_row_reduce_params& p) {
  return with_float_type(p.part[0].out_dtype,
                         "Rows are added into bf16, fp16 or float32, not into dtype %d.",
                         [&](auto* out) { return reduce_as<In, Pointee<decltype(out)>>(p); });
}

magi_status reduce(const magi_row_reduce_params& p) {
  MAGI_RETURN(check_parts(p));
  if (p.num_rows == 0) return MAGI_OK;
  return with_float_type(p.part[0].in_dtype,
                         "Rows of bf16, fp16 and float32 are added, not of dtype %d.",
                         [&](auto* in) { return reduce_from<Pointee<decltype(in)>>(p); });
}

}  // namespace rows
}  // namespace magi

extern "C" magi_status magi_row_reduce(const magi_row_reduce_params* params) {
  return magi::rows::reduce(*params);
}
