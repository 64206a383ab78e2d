// SPDX-License-Identifier: Apache-2.0
// Rows out of this rank's box to their places in ordinary tensors, see magi/box.h.

#include "../../ffa/common/host.h"
#include "await.cuh"
#include "box.cuh"
#include "box_launch.h"

namespace magi {
inline namespace box_taking {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kTakeThreads = 256;
constexpr int kUnroll = 4;

// By a CTA, 16 bytes a lane. Past the first cache: its lines are of no use, and other GPUs wrote what is read.
__device__ __forceinline__ void copy_span(const char* from, char* to, int64_t bytes) {
  const uint4* source = reinterpret_cast<const uint4*>(from);
  uint4* target = reinterpret_cast<uint4*>(to);
  const int64_t count = bytes / 16;
  for (int64_t at = threadIdx.x; at < count; at += kUnroll * kTakeThreads) {
    uint4 x[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * kTakeThreads < count) x[i] = __ldcg(source + at + i * kTakeThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * kTakeThreads < count) target[at + i * kTakeThreads] = x[i];
  }
}

// The same where rows of the result are `stride` apart: a row after another, all at once.
__device__ __forceinline__ void copy_rows_apart(const char* from, char* to, int rows, int64_t row, int64_t stride) {
  const int per_row = static_cast<int>(row / 16), count = rows * per_row;
  for (int at = threadIdx.x; at < count; at += kTakeThreads) {
    const int i = at / per_row, column = (at - i * per_row) * 16;
    *reinterpret_cast<uint4*>(to + i * stride + column) = __ldcg(reinterpret_cast<const uint4*>(from + i * row + column));
  }
}

// One piece: slot, first row in the box, first row of the result, rows.
__device__ __forceinline__ void copy_piece(const magi_box_take_params& p, int4 piece) {
  for (int t = 0; t < p.num_tensors; ++t) {
    const int64_t row = p.row_bytes[t], stride = p.out_stride[t];
    const char* from = static_cast<const char*>(p.box.own) + p.data_at[t] + piece.y * row;
    char* to = static_cast<char*>(p.out[t]) + piece.z * stride;
    if (stride == row)
      copy_span(from, to, piece.w * row);
    else
      copy_rows_apart(from, to, piece.w, row, stride);
  }
}

__global__ void __launch_bounds__(kTakeThreads) box_take(const __grid_constant__ magi_box_take_params p) {
  for (int i = blockIdx.x; i < p.num_pieces; i += gridDim.x) copy_piece(p, __ldg(reinterpret_cast<const int4*>(p.pieces) + i));
  // The last CTA ends the use. This rank's own rows have left: the push is before this in the stream.
  if (!is_last_cta(box_word(p.box.own, MAGI_BOX_TAKEN(p.world)))) return;
  __threadfence_system();
  release_box(p.box, p.rank, p.world);
}

}  // namespace box_taking
}  // namespace magi

extern "C" magi_status magi_box_take(const magi_box_take_params* params) {
  const magi_box_take_params& p = *params;
  MAGI_RETURN(magi::check_world(p.version, p.rank, p.world, p.box));
  if (p.num_tensors < 1 || p.num_tensors > MAGI_BOX_TENSORS || p.num_ctas < 1 || p.num_pieces < 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d tensors by %d CTAs; give 1 to %d tensors and a CTA or more.", p.num_tensors,
                      p.num_ctas, MAGI_BOX_TENSORS);
  for (int t = 0; t < p.num_tensors; ++t)
    if (p.row_bytes[t] % 16 || p.out_stride[t] % 16 || p.data_at[t] % 16 || reinterpret_cast<uintptr_t>(p.out[t]) % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Rows of tensor %d do not begin and end at multiples of 16 bytes.", t);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  magi::box_await<<<1, magi::kAwaitThreads, MAGI_BOX_GROUPS * p.world * sizeof(int), stream>>>(p);
  MAGI_RETURN(magi::cuda_status(cudaGetLastError(), "launching the wait for rows"));
  magi::box_take<<<p.num_ctas, magi::kTakeThreads, 0, stream>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the copy out of a box");
}
