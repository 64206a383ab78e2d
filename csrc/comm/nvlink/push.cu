// SPDX-License-Identifier: Apache-2.0
// Rows straight into the boxes of other ranks: plain 16-byte loads and stores by a few CTAs, see magi/box.h.

#include "../../ffa/common/barrier.cuh"
#include "../../ffa/common/host.h"
#include "box.cuh"

namespace magi {
inline namespace box_pushing {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kPushThreads = 1024;
constexpr int kInFlight = 4;  // 16-byte loads of a thread before their stores

// The CTAs share the rows of a piece out by warps.
__device__ __forceinline__ void push_rows(const magi_box_push_params& p, int4 piece, char* box) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = piece.w;
  for (int t = 0; t < p.num_tensors; ++t) {
    const int chunks = static_cast<int>(p.row_bytes[t] / 16), per_row = (chunks + 31) / 32, total = rows * per_row;
    const char* from = static_cast<const char*>(p.source[t]);
    char* to = box + p.data_at[t] + static_cast<int64_t>(piece.z) * p.row_bytes[t];
    // A unit is 32 chunks of a row.
    for (int first = warp; first < total; first += kPushThreads / 32 * kInFlight) {
      uint4 value[kInFlight];
      int64_t at[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int unit = first + i * (kPushThreads / 32), row = unit / per_row, chunk = (unit - row * per_row) * 32 + lane;
        at[i] = -1;
        if (unit >= total || chunk >= chunks) continue;
        at[i] = static_cast<int64_t>(row) * p.row_bytes[t] + 16 * chunk;
        value[i] = piece.y < 0 ? make_uint4(0, 0, 0, 0)
                               : __ldcs(reinterpret_cast<const uint4*>(from + (piece.y + row) * p.source_stride[t]) + chunk);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (at[i] >= 0) *reinterpret_cast<uint4*>(to + at[i]) = value[i];
    }
  }
}

__global__ void __launch_bounds__(kPushThreads, 1) box_push(const __grid_constant__ magi_box_push_params p) {
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES(p.world)) + 1;
  // What the receivers have of the use before must be over.
  for (int peer = threadIdx.x; peer < p.world; peer += kPushThreads) {
    if (peer == p.rank) continue;
    if (p.pieces_for[peer] > 0)
      wait_for_word(box_word(p.box.own, MAGI_BOX_FREE(p.world, peer)), use - 1, p.timeout_ms, p.failure, peer);
    if (p.also_free.own != nullptr) {
      const uint32_t over = *box_word(p.also_free.own, MAGI_BOX_USES(p.world));
      wait_for_word(box_word(p.also_free.own, MAGI_BOX_FREE(p.world, peer)), over, p.timeout_ms, p.failure, peer);
    }
  }
  __syncthreads();
  // From here on this CTA holds its multiprocessor until it is done, whatever the next kernel takes.
  start_next_kernel();
  int done = 0;  // pieces for the rank at hand
  for (int i = blockIdx.x; i < p.num_pieces; i += gridDim.x) {
    const int4 piece = reinterpret_cast<const int4*>(p.pieces)[i];
    push_rows(p, piece, reinterpret_cast<char*>(p.box.of_rank[piece.x]));
    ++done;
    const int next = i + gridDim.x;
    if (next < p.num_pieces && p.pieces[4 * next] == piece.x) continue;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* left = box_word(p.box.own, MAGI_BOX_LEFT(p.world, piece.x));
      if (atomicAdd(left, done) + done == static_cast<uint32_t>(p.pieces_for[piece.x])) {
        *left = 0;
        __threadfence_system();
        store_release_system(box_word(p.box.of_rank[piece.x], MAGI_BOX_ARRIVED(p.world, p.rank)), use);
      }
    }
    done = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // left[rank] is free: nobody sends to himself.
    uint32_t* ctas = box_word(p.box.own, MAGI_BOX_LEFT(p.world, p.rank));
    __threadfence();
    if (atomicAdd(ctas, 1) + 1 == gridDim.x) {
      *ctas = 0;
      __threadfence();
      store_release_system(box_word(p.box.own, MAGI_BOX_PUSHED(p.world)), use);
    }
  }
}

__global__ void __launch_bounds__(128) box_release(const __grid_constant__ magi_box_release_params p) {
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES(p.world)) + 1;
  wait_for_word(box_word(p.box.own, MAGI_BOX_PUSHED(p.world)), use, p.timeout_ms, p.failure, p.rank);
  __syncthreads();
  release_box(p.box, p.rank, p.world);
}

magi_status check_world(int32_t version, int32_t rank, int32_t world, const magi_box& box) {
  if (version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT, "params have ABI version %d and this library %d; rebuild the kernels.", version,
                MAGI_ABI_VERSION);
  if (world < 2 || rank < 0 || rank >= world)
    return fail(MAGI_INVALID_ARGUMENT, "rank %d of %d: boxes need two ranks or more, numbered from 0.", rank, world);
  if (box.own == nullptr || box.of_rank == nullptr) return fail(MAGI_INVALID_ARGUMENT, "The box has no address.");
  return MAGI_OK;
}

}  // namespace box_pushing
}  // namespace magi

extern "C" {

int64_t magi_box_control_bytes(int32_t world) { return ((3ll * world + 2) * MAGI_BOX_WORD_BYTES + 1023) / 1024 * 1024; }

magi_status magi_box_push(const magi_box_push_params* params) {
  const magi_box_push_params& p = *params;
  MAGI_RETURN(magi::check_world(p.version, p.rank, p.world, p.box));
  if (p.num_tensors < 1 || p.num_tensors > MAGI_BOX_TENSORS || p.num_ctas < 1)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d tensors by %d CTAs; give 1 to %d tensors and a CTA or more.", p.num_tensors,
                      p.num_ctas, MAGI_BOX_TENSORS);
  for (int t = 0; t < p.num_tensors; ++t)
    if (p.row_bytes[t] % 16 || p.source_stride[t] % 16 || p.data_at[t] % 16 || reinterpret_cast<uintptr_t>(p.source[t]) % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Rows of tensor %d do not begin and end at multiples of 16 bytes.", t);
  magi::box_push<<<p.num_ctas, magi::kPushThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the push of rows");
}

magi_status magi_box_release(const magi_box_release_params* params) {
  MAGI_RETURN(magi::check_world(params->version, params->rank, params->world, params->box));
  magi::box_release<<<1, 128, 0, static_cast<cudaStream_t>(params->stream)>>>(*params);
  return magi::cuda_status(cudaGetLastError(), "launching the release of a box");
}
}
