// SPDX-License-Identifier: Apache-2.0
// Rows out of this rank's box to their places in ordinary tensors, as they arrive, see magi/box.h.

#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"

namespace magi {
inline namespace box_taking {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kTakeThreads = 512;
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

// Starts beside this rank's push, in few CTAs: each waits for the slot of its next piece and holds its place meanwhile.
__global__ void __launch_bounds__(kTakeThreads) box_take(const __grid_constant__ magi_box_take_params p) {
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  int there = -1;  // the last slot that has been waited for
  for (int i = blockIdx.x; i < p.num_pieces; i += gridDim.x) {
    const int4 piece = __ldg(reinterpret_cast<const int4*>(p.pieces) + i);
    if (piece.x != there) {
      there = piece.x;
      if (threadIdx.x == 0)
        wait_for_word(box_word(p.box.own, MAGI_BOX_ARRIVED(p.world, there)), use, p.timeout_ms, p.failure, there / MAGI_BOX_GROUPS);
      __syncthreads();
    }
    copy_piece(p, piece);
  }
  // The last CTA ends the use.
  if (!is_last_cta(box_word(p.box.own, MAGI_BOX_TAKEN(p.world)))) return;
  __threadfence_system();
  release_pushed_box(p.box, p.rank, p.world, p.timeout_ms, p.failure);
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
  return magi::launch_behind(magi::box_take, dim3(p.num_ctas), magi::kTakeThreads, 0, p.stream, p, "launching the copy out of a box");
}
