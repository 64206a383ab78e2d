// SPDX-License-Identifier: Apache-2.0
// Rows straight into the boxes of other ranks, by bulk copies through the shared memory of a few CTAs, see magi/box.h. Plain loads
// and stores were as fast alone, and slower beside attention: docs/notes/one_launch.md.

#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"
#include "chunks.cuh"

namespace magi {
inline namespace box_pushing {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kPushStages = 5;
constexpr int kSignalDelay = 3;  // chunks between the last of a slot and its signal: how long stores are on their way
constexpr int kZeros = Stages<kPushStages>::kSmem;  // where a stage of zeros begins
constexpr int kPushSmem = kZeros + kStageBytes;
static_assert(kZeros % 16 == 0, "bulk copies read there");

// The rows of `done` pieces of a slot have arrived. Who counts the last one tells the receiver, and only there a fence reaches
// beyond this GPU: it takes microseconds while others write.
__device__ __forceinline__ void count_pieces(const magi_box_push_params& p, int own_slot, int4 slot, int done, uint32_t use) {
  uint32_t* left = box_word(p.box.own, MAGI_BOX_LEFT(p.world, own_slot));
  __threadfence();
  if (atomicAdd(left, done) + done != static_cast<uint32_t>(slot.z)) return;
  __threadfence();
  *left = 0;
  store_release_system(box_word(p.box.of_rank[slot.x], MAGI_BOX_ARRIVED(p.world, slot.y)), use);
}

// One lane: chunks of pieces, which are taken from a counter, as beside attention some CTAs are half as fast as others. The number of a piece is
// asked for two ahead and the piece one ahead.
__device__ void load_pieces(const magi_box_push_params& p, const Stages<kPushStages>& stages) {
  uint32_t* counter = box_word(p.box.own, MAGI_BOX_NEXT(p.world));
  auto take = [&] { return static_cast<int>(gridDim.x + atomicAdd(counter, 1)); };
  auto piece_of = [&](int i) { return i < p.num_pieces ? __ldg(reinterpret_cast<const int4*>(p.pieces) + i) : make_int4(0, 0, 0, 0); };
  ChunkLoader<kPushStages> loader{stages};
  int index = blockIdx.x, next = take();
  int4 piece = piece_of(index);
  while (index < p.num_pieces) {
    const int4 slot = __ldg(reinterpret_cast<const int4*>(p.slots) + piece.x), next_piece = piece_of(next);
    const int after = next < p.num_pieces ? take() : next;
    char* box = reinterpret_cast<char*>(p.box.of_rank[slot.x]);
    for_chunks(p, piece.w, [&](int t, int row, int rows, int column, int bytes) {
      const int64_t row_bytes = p.row_bytes[t], stride = p.source_stride[t];
      const bool ends_piece = t + 1 == p.num_tensors && row + rows == piece.w && column + bytes == row_bytes;
      char* to = box + p.data_at[t] + (piece.z + row) * row_bytes + column;
      const bool are_zeros = piece.y < 0;  // which are in a stage of their own
      const char* from = are_zeros ? nullptr : static_cast<const char*>(p.source[t]) + (piece.y + row) * stride + column;
      loader.put(Chunk{to, bytes, rows, bytes, piece.x, ends_piece, are_zeros, slot}, from, stride);
    });
    index = next, next = after, piece = next_piece;
  }
  loader.end();
}

// Another: stores, and when those of a slot have arrived its signal.
__device__ void store_pieces(const magi_box_push_params& p, const Stages<kPushStages>& stages, uint32_t use) {
  ChunkStorer<kPushStages> storer{stages};
  int slot = -1, done = 0;                       // the slot at hand, and pieces of it that have been stored
  int waiting = 0, waiting_slot = 0, since = 0;  // pieces to be signalled, and chunks stored since
  int4 receiver = make_int4(0, 0, 0, 0), waiting_for = receiver;
  auto signal = [&] {
    if (waiting > 0) count_pieces(p, waiting_slot, waiting_for, waiting, use);
    waiting = 0;
  };
  auto end_slot = [&] {
    if (waiting > 0) {
      store_wait_all();
      signal();
    }
    waiting = done, waiting_slot = slot, waiting_for = receiver, since = 0, done = 0;
  };
  for (Chunk chunk = storer.next(); chunk.rows > 0; chunk = storer.next()) {
    if (chunk.own_slot != slot) {
      if (slot >= 0) end_slot();
      slot = chunk.own_slot, receiver = chunk.slot;
    }
    storer.store(chunk, chunk.are_zeros ? stages.smem + kZeros : stages.stage(storer.stored));
    done += chunk.ends_piece;
    if (waiting > 0 && ++since == kSignalDelay) {
      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kSignalDelay) : "memory");
      signal();
    }
  }
  if (slot >= 0) end_slot();
  store_wait_all();
  signal();
}

__global__ void __launch_bounds__(kMoveThreads, 1) box_push(const __grid_constant__ magi_box_push_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ Chunk chunks[kPushStages];
  const Stages<kPushStages> stages{smem_addr(raw), chunks};
  const uint32_t use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  if (threadIdx.x == 0) stages.init();
  for (int i = threadIdx.x; i < kStageBytes / 16; i += kMoveThreads) reinterpret_cast<uint4*>(raw + kZeros)[i] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  // What the receivers have of the use before must be over.
  for (int peer = threadIdx.x; peer < p.world; peer += kMoveThreads) {
    if (peer == p.rank) continue;
    wait_for_word(box_word(p.box.own, MAGI_BOX_FREE(p.world, peer)), use - 1, p.timeout_ms, p.failure, peer);
    if (p.also_free.own == nullptr) continue;
    const uint32_t over = *box_word(p.also_free.own, MAGI_BOX_USES);
    wait_for_word(box_word(p.also_free.own, MAGI_BOX_FREE(p.world, peer)), over, p.timeout_ms, p.failure, peer);
  }
  __syncthreads();
  // From here on this CTA holds its multiprocessor until it is done, whatever the next kernel takes.
  start_next_kernel();
  if (threadIdx.x == 32) load_pieces(p, stages);
  if (threadIdx.x != 0) return;
  store_pieces(p, stages, use);
  uint32_t* ctas = box_word(p.box.own, MAGI_BOX_CTAS);
  __threadfence();
  if (atomicAdd(ctas, 1) + 1 != gridDim.x) return;
  *ctas = 0;
  *box_word(p.box.own, MAGI_BOX_NEXT(p.world)) = 0;
  __threadfence();
  store_release_system(box_word(p.box.own, MAGI_BOX_PUSHED), use);
}

}  // namespace box_pushing
}  // namespace magi

extern "C" {

int64_t magi_box_control_bytes(int32_t world) {
  return ((MAGI_BOX_NEXT(world) + 1) * static_cast<int64_t>(MAGI_BOX_WORD_BYTES) + 1023) / 1024 * 1024;
}

magi_status magi_box_push(const magi_box_push_params* params) {
  const magi_box_push_params& p = *params;
  MAGI_RETURN(magi::check_world(p.version, p.rank, p.world, p.box));
  if (p.num_tensors < 1 || p.num_tensors > MAGI_BOX_TENSORS || p.num_ctas < 1)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d tensors by %d CTAs; give 1 to %d tensors and a CTA or more.", p.num_tensors,
                      p.num_ctas, MAGI_BOX_TENSORS);
  for (int t = 0; t < p.num_tensors; ++t)
    if (p.row_bytes[t] % 16 || p.source_stride[t] % 16 || p.data_at[t] % 16 || reinterpret_cast<uintptr_t>(p.source[t]) % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Rows of tensor %d do not begin and end at multiples of 16 bytes.", t);
  static magi::DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(magi::box_push, cudaFuncAttributeMaxDynamicSharedMemorySize, magi::kPushSmem);
  }));
  magi::box_push<<<p.num_ctas, magi::kMoveThreads, magi::kPushSmem, static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the push of rows");
}
}
