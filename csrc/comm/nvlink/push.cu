// SPDX-License-Identifier: Apache-2.0
// Rows straight into the boxes of other ranks, by bulk copies through the shared memory of a few CTAs, see magi/box.h. Plain loads
// and stores were as fast alone, and slower beside attention: docs/notes/one_launch.md.

#include "../../ffa/common/barrier.cuh"
#include "../../ffa/common/copy.cuh"
#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"

namespace magi {
inline namespace box_pushing {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kPushThreads = 32;
constexpr int kStages = 5;
constexpr int kStageBytes = 32768;
constexpr int kSignalDelay = 3;  // chunks between the last of a slot and its signal: how long stores are on their way
constexpr int kPushSmem = (kStages + 1) * kStageBytes + 8 * kStages;

constexpr int kPiecesAhead = 8;
static_assert(kPiecesAhead > kStages, "every piece has a chunk, and loads are less than all stages ahead");

// Where a lane is in the chunks of a piece: whole rows of one tensor that fit into a stage, or a part of a row.
struct PushCursor {
  int index, tensor = 0, row = 0, column = 0;
  int4 piece, slot;

  __device__ PushCursor(const magi_box_push_params& p) { begin(p, blockIdx.x); }
  __device__ void begin(const magi_box_push_params& p, int i) {
    index = i;
    if (!valid(p)) return;
    piece = __ldg(reinterpret_cast<const int4*>(p.pieces) + index);
    slot = __ldg(reinterpret_cast<const int4*>(p.slots) + piece.x);
  }
  __device__ bool valid(const magi_box_push_params& p) const { return index < p.num_pieces; }
  __device__ int row_bytes(const magi_box_push_params& p) const { return static_cast<int>(p.row_bytes[tensor]); }
  __device__ int rows(const magi_box_push_params& p) const {
    const int fit = kStageBytes / row_bytes(p);
    return fit < 1 ? 1 : min(fit, piece.w - row);
  }
  // Of each of its rows.
  __device__ int bytes(const magi_box_push_params& p) const { return min(row_bytes(p) - column, kStageBytes); }
  __device__ const char* from(const magi_box_push_params& p, int i) const {
    return static_cast<const char*>(p.source[tensor]) + (piece.y + row + i) * p.source_stride[tensor] + column;
  }
  __device__ char* to(const magi_box_push_params& p) const {
    return reinterpret_cast<char*>(p.box.of_rank[slot.x]) + p.data_at[tensor] +
           static_cast<int64_t>(piece.z + row) * p.row_bytes[tensor] + column;
  }
  // To the next chunk; true if that was the last one of the piece.
  __device__ bool advance(const magi_box_push_params& p) {
    column += bytes(p);
    if (column < row_bytes(p)) return false;
    column = 0;
    row += rows(p);
    if (row < piece.w) return false;
    row = 0;
    if (++tensor < p.num_tensors) return false;
    tensor = 0;
    return true;
  }
};

__device__ __forceinline__ void load_chunk(const magi_box_push_params& p, const PushCursor& at, uint32_t stage, uint32_t full) {
  const int rows = at.rows(p), bytes = at.bytes(p);
  mbar_expect(full, at.piece.y < 0 ? 0 : rows * bytes);
  if (at.piece.y < 0) return;  // zeros, which are in a stage of their own
  if (bytes == p.source_stride[at.tensor]) {
    load_bytes(stage, at.from(p, 0), rows * bytes, full);
    return;
  }
  for (int i = 0; i < rows; ++i) load_bytes(stage + i * bytes, at.from(p, i), bytes, full);
}

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

// One lane: loads run ahead of stores by some stages, and signals follow when the stores have arrived. Pieces are taken from a
// counter: beside attention some CTAs are half as fast as others.
__device__ void push_pieces(const magi_box_push_params& p, uint32_t smem, uint32_t use) {
  __shared__ int ahead[kPiecesAhead];  // pieces that loads have begun and stores have not
  uint32_t* counter = box_word(p.box.own, MAGI_BOX_NEXT(p.world));
  auto take = [&] { return static_cast<int>(gridDim.x + atomicAdd(counter, 1)); };
  int next = take(), loads_begun = 0, stores_begun = 0;  // the next piece is asked for before it is needed
  const uint32_t zeros = smem + kStages * kStageBytes, bars = zeros + kStageBytes;
  PushCursor loads(p), stores(p);
  int loaded = 0, stored = 0, done = 0;
  int waiting = 0, waiting_slot = 0, since = 0;  // pieces to be signalled, and chunks stored since
  int4 waiting_for = make_int4(0, 0, 0, 0);
  auto signal = [&] {
    if (waiting > 0) count_pieces(p, waiting_slot, waiting_for, waiting, use);
    waiting = 0;
  };
  while (stores.valid(p)) {
    while (loads.valid(p) && loaded - stored < kStages - 1) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      load_chunk(p, loads, smem + loaded % kStages * kStageBytes, bars + 8 * (loaded % kStages));
      ++loaded;
      if (!loads.advance(p)) continue;
      ahead[loads_begun++ % kPiecesAhead] = next;
      loads.begin(p, next);
      if (loads.valid(p)) next = take();
    }
    mbar_wait(bars + 8 * (stored % kStages), stored / kStages & 1);
    store_bytes(stores.to(p), stores.piece.y < 0 ? zeros : smem + stored % kStages * kStageBytes, stores.rows(p) * stores.bytes(p));
    store_commit();
    ++stored;
    if (waiting > 0 && ++since == kSignalDelay) {
      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kSignalDelay) : "memory");
      signal();
    }
    const int own_slot = stores.piece.x;
    const int4 slot = stores.slot;
    if (!stores.advance(p)) continue;
    stores.begin(p, ahead[stores_begun++ % kPiecesAhead]);
    ++done;
    if (stores.valid(p) && stores.piece.x == own_slot) continue;
    if (waiting > 0) {
      store_wait_all();
      signal();
    }
    waiting = done, waiting_slot = own_slot, waiting_for = slot, since = 0, done = 0;
  }
  store_wait_all();
  signal();
}

__global__ void __launch_bounds__(kPushThreads, 1) box_push(const __grid_constant__ magi_box_push_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t smem = smem_addr(raw), use = *box_word(p.box.own, MAGI_BOX_USES) + 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbar_init(smem + (kStages + 1) * kStageBytes + 8 * i, 1);
    mbar_init_fence();
  }
  for (int i = threadIdx.x; i < kStageBytes / 16; i += kPushThreads)
    reinterpret_cast<uint4*>(raw + kStages * kStageBytes)[i] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  // What the receivers have of the use before must be over.
  for (int peer = threadIdx.x; peer < p.world; peer += kPushThreads) {
    if (peer == p.rank) continue;
    wait_for_word(box_word(p.box.own, MAGI_BOX_FREE(p.world, peer)), use - 1, p.timeout_ms, p.failure, peer);
    if (p.also_free.own == nullptr) continue;
    const uint32_t over = *box_word(p.also_free.own, MAGI_BOX_USES);
    wait_for_word(box_word(p.also_free.own, MAGI_BOX_FREE(p.world, peer)), over, p.timeout_ms, p.failure, peer);
  }
  __syncthreads();
  // From here on this CTA holds its multiprocessor until it is done, whatever the next kernel takes.
  start_next_kernel();
  if (threadIdx.x != 0) return;
  push_pieces(p, smem, use);
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
  magi::box_push<<<p.num_ctas, magi::kPushThreads, magi::kPushSmem, static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the push of rows");
}
}
