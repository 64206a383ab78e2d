// SPDX-License-Identifier: Apache-2.0
// Partial attention results of a row become one, weighted by their lse. One order, so the same bits
// on every run.
#include "range_ops/rows.cuh"

namespace magi {
namespace rows {

constexpr int kFew = 3;  // terms that a thread has under way at once

struct MergeArgs {
  Walk walk;
  int64_t num_rows, in_stride, out_stride, in_lse_stride, out_lse_stride;
  int32_t heads, head_vectors, accumulate, write_lse;
  const int32_t *rows, *begin, *sources;
  const char *in, *in_lse;
  char *out, *out_lse;
};

// One row of the list: its place among the outputs, and its terms.
struct Terms {
  int first, last;
  char *out, *out_lse;
};

// A piece of a row as it is in memory, so that it takes few registers while it is under way.
template <typename T, int kElements>
struct Vector {
  alignas(16) T raw[kElements];
  __device__ __forceinline__ void load(const void* from) { load_raw<T, kElements>(from, raw); }
  __device__ __forceinline__ void add_to(float (&sum)[kElements], float weight) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] += weight * static_cast<float>(raw[i]);
  }
};

__device__ __forceinline__ float lse_of(const MergeArgs& args, int source, int head) {
  return reinterpret_cast<const float*>(args.in_lse +
                                        args.sources[source] * args.in_lse_stride)[head];
}

// The lse of all terms of a head; -inf if there is nothing. `old`: what the output holds, or -inf.
__device__ __forceinline__ float merged_lse(const MergeArgs& args, const Terms& row, int head,
                                            float old) {
  float top = old;
  for (int j = row.first; j < row.last; ++j) top = fmaxf(top, lse_of(args, j, head));
  if (top == -INFINITY) return top;
  float mass = expf(old - top);
  for (int j = row.first; j < row.last; ++j) mass += expf(lse_of(args, j, head) - top);
  return top + logf(mass);
}

template <typename In, typename Out, int kElements>
__device__ __forceinline__ void merge_vector(const MergeArgs& args, const Terms& row, int v,
                                             float old, float lse) {
  const int64_t element = int64_t{v} * kElements;
  const int head = v / args.head_vectors;
  char* const out = row.out + element * sizeof(Out);
  float sum[kElements], x[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] = 0.f;
  // A term of lse -inf may hold anything, NaN too, so it is not even read.
  if (old != -INFINITY) {
    const float weight = expf(old - lse);
    load_floats<Out, kElements>(out, x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = weight * x[i];
  }
  for (int j = row.first; j < row.last; ++j) {
    const float part_lse = lse_of(args, j, head);
    if (part_lse == -INFINITY) continue;
    const float weight = expf(part_lse - lse);
    load_floats<In, kElements>(args.in + args.sources[j] * args.in_stride + element * sizeof(In),
                               x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] += weight * x[i];
  }
  store_floats<Out, kElements>(out, sum);
}

// The same for few terms: all of them are under way before the first is needed.
template <typename In, typename Out, int kElements, int kTerms>
__device__ __forceinline__ void merge_few(const MergeArgs& args, const Terms& row, int v) {
  const int64_t element = int64_t{v} * kElements;
  const int head = v / args.head_vectors, count = row.last - row.first;
  char* const out = row.out + element * sizeof(Out);
  Vector<Out, kElements> old;
  Vector<In, kElements> in[kTerms];
  float lse[kTerms], old_lse = -INFINITY, top;
  if (args.accumulate) {
    old_lse = reinterpret_cast<const float*>(row.out_lse)[head];
    old.load(out);
  }
#pragma unroll
  for (int j = 0; j < kTerms; ++j) {
    lse[j] = -INFINITY;
    if (j < count) {
      lse[j] = lse_of(args, row.first + j, head);
      in[j].load(args.in + args.sources[row.first + j] * args.in_stride + element * sizeof(In));
    }
  }
  top = old_lse;
#pragma unroll
  for (int j = 0; j < kTerms; ++j) top = fmaxf(top, lse[j]);
  const float shift = top == -INFINITY ? 0.f : top;
  float mass = expf(old_lse - shift);
#pragma unroll
  for (int j = 0; j < kTerms; ++j) mass += expf(lse[j] - shift);
  const float total = shift + logf(mass);
  float sum[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] = 0.f;
  if (old_lse != -INFINITY) old.add_to(sum, expf(old_lse - total));
#pragma unroll
  for (int j = 0; j < kTerms; ++j)
    if (lse[j] != -INFINITY) in[j].add_to(sum, expf(lse[j] - total));
  store_floats<Out, kElements>(out, sum);
}

template <typename In, typename Out, int kElements>
__global__ void __launch_bounds__(kThreads, 3) merge_rows(const __grid_constant__ MergeArgs args) {
  const int lanes = 1 << args.walk.log_lanes;
  for (int64_t chunk = blockIdx.x; chunk < args.walk.num_chunks; chunk += gridDim.x) {
    const Place at = place_in(args.walk, chunk);
    const bool is_row = at.row < args.num_rows;
    Terms row{};
    if (is_row) {
      const int64_t target = args.rows == nullptr ? at.row : args.rows[at.row];
      row = {args.begin[at.row], args.begin[at.row + 1], args.out + target * args.out_stride,
             args.out_lse + target * args.out_lse_stride};
      const bool is_few = row.last - row.first <= kFew;
      for (int v = at.begin; v < at.end; v += lanes) {
        if (is_few) {
          merge_few<In, Out, kElements, kFew>(args, row, v);
          continue;
        }
        const int head = v / args.head_vectors;
        const float old =
            args.accumulate ? reinterpret_cast<const float*>(row.out_lse)[head] : -INFINITY;
        merge_vector<In, Out, kElements>(args, row, v, old, merged_lse(args, row, head, old));
      }
    }
    if (!args.write_lse) continue;
    __syncthreads();  // others of this row may still want the old lse
    if (!is_row) continue;
    for (int head = at.begin; head < args.heads; head += lanes) {
      float* const lse = reinterpret_cast<float*>(row.out_lse) + head;
      *lse = merged_lse(args, row, head, args.accumulate ? *lse : -INFINITY);
    }
  }
}

template <typename In, typename Out, int kElements>
magi_status launch_merge(const magi_row_merge_params& p) {
  MergeArgs args;
  const magi_row_part& part = p.part;
  // Rows are not cut: one block has to be through with a row before it writes its lse.
  args.walk = make_walk(p.num_rows, part.elements / kElements, 1, false);
  args.num_rows = p.num_rows;
  args.in_stride = part.in_stride;
  args.out_stride = part.out_stride;
  args.in_lse_stride = p.in_lse_stride;
  args.out_lse_stride = p.out_lse_stride;
  args.heads = p.heads;
  args.head_vectors = static_cast<int32_t>(part.elements / p.heads / kElements);
  args.accumulate = p.accumulate;
  args.write_lse = p.write_lse;
  args.rows = p.rows;
  args.begin = p.begin;
  args.sources = p.sources;
  args.in = static_cast<const char*>(part.in);
  args.in_lse = reinterpret_cast<const char*>(p.in_lse);
  args.out = static_cast<char*>(part.out);
  args.out_lse = reinterpret_cast<char*>(p.out_lse);
  int count = 0;
  MAGI_RETURN(multiprocessors(&count));
  const int grid = blocks_for(args.walk.num_chunks, count);
  merge_rows<In, Out, kElements><<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(args);
  return cuda_status(cudaGetLastError(), "launching a merge of rows");
}

template <typename In, typename Out>
magi_status merge_as(const magi_row_merge_params& p) {
  const bool is_fast = bits_of(p.part) % 16 == 0 && p.part.elements / p.heads % 8 == 0;
  return is_fast ? launch_merge<In, Out, 8>(p) : launch_merge<In, Out, 1>(p);
}

template <typename In>
magi_status merge_from(const magi_row_merge_params& p) {
  return with_float_type(p.part.out_dtype,
                         "Rows are merged into bf16, fp16 or float32, not into dtype %d.",
                         [&](auto* out) { return merge_as<In, Pointee<decltype(out)>>(p); });
}

magi_status merge(const magi_row_merge_params& p) {
  MAGI_RETURN(check_rows(p.version, p.num_rows));
  MAGI_RETURN(check_part(p.part));
  if (p.heads < 1 || p.part.elements % p.heads != 0)
    return fail(MAGI_INVALID_ARGUMENT, "%lld elements of a row are no multiple of %d heads.",
                static_cast<long long>(p.part.elements), p.heads);
  if (p.num_rows == 0) return MAGI_OK;
  return with_float_type(p.part.in_dtype,
                         "Rows of bf16, fp16 and float32 are merged, not of dtype %d.",
                         [&](auto* in) { return merge_from<Pointee<decltype(in)>>(p); });
}

}  // namespace rows
}  // namespace magi

extern "C" magi_status magi_row_merge(const magi_row_merge_params* params) {
  return magi::rows::merge(*params);
}
