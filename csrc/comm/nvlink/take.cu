// SPDX-License-Identifier: Apache-2.0
// Rows out of this rank's box to their places in ordinary tensors, as they arrive, see magi/box.h. By bulk copies, which take fewer CTAs than
// loads and stores.

#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"
#include "chunks.cuh"

namespace magi {
inline namespace box_taking {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kTakeStages = 6;
constexpr int kTakeSmem = Stages<kTakeStages>::kSmem;

// One lane: chunks of pieces, each when its slot has arrived.
__device__ void load_pieces(const magi_box_take_params& p, const Stages<kTakeStages>& stages, uint32_t use) {
  auto piece_of = [&](int i) { return i < p.num_pieces ? __ldg(reinterpret_cast<const int4*>(p.pieces) + i) : make_int4(-1, 0, 0, 0); };
  int there = -1;  // the last slot that has been waited for
  ChunkLoader<kTakeStages> loader{stages};
  int4 piece = piece_of(blockIdx.x);
  for (int i = blockIdx.x; i < p.num_pieces; i += gridDim.x) {
    const int4 next = piece_of(i + gridDim.x);
    if (piece.x != there) {
      there = piece.x;
      wait_for_word(box_word(p.box.own, MAGI_BOX_ARRIVED(p.world, there)), use, p.timeout_ms, p.failure, there / MAGI_BOX_GROUPS);
      fence_proxies();  // other GPUs wrote what bulk copies read
    }
    for_chunks(p, piece.w, [&](int t, int row, int rows, int column, int bytes) {
      const int64_t row_bytes = p.row_bytes[t], stride = p.out_stride[t];
      const char* from = static_cast<const char*>(p.box.own) + p.data_at[t] + (piece.y + row) * row_bytes + column;
      char* to = static_cast<char*>(p.out[t]) + (piece.z + row) * stride + column;
      loader.put(Chunk{to, stride, rows, bytes}, from, row_bytes);
    });
    piece = next;
  }
  loader.end();
}

__device__ void store_pieces(const Stages<kTakeStages>& stages) {
  ChunkStorer<kTakeStages> storer{stages};
  for (Chunk chunk = storer.next(); chunk.rows > 0; chunk = storer.next()) storer.store(chunk, stages.stage(storer.stored));
  store_wait_all();
}

// Starts beside this rank's push, in few CTAs: each waits for the slot of its next piece and holds its place meanwhile.
__global__ void __launch_bounds__(kMoveThreads, 1) box_take(const __grid_constant__ magi_box_take_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ Chunk chunks[kTakeStages];
  const Stages<kTakeStages> stages{smem_addr(raw), chunks};
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  if (threadIdx.x == 0) stages.init();
  __syncthreads();
  if (threadIdx.x == 32) load_pieces(p, stages, use);
  if (threadIdx.x == 0) store_pieces(stages);
  __syncthreads();
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
  static magi::DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(magi::box_take, cudaFuncAttributeMaxDynamicSharedMemorySize, magi::kTakeSmem);
  }));
  return magi::launch_behind(magi::box_take, dim3(p.num_ctas), magi::kMoveThreads, magi::kTakeSmem, p.stream, p,
                             "launching the copy out of a box");
}
