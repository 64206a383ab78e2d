// SPDX-License-Identifier: Apache-2.0
// Rows straight into the buffers of other ranks, by bulk copies through the shared memory of a few
// CTAs, see magi/symm.h. Plain loads and stores were as fast alone, and slower beside attention:
// docs/log/one_launch.md.

#include "ffa/common/host.h"
#include "comm/symm/signal.cuh"
#include "comm/symm/launch.h"
#include "comm/symm/pipeline.cuh"

namespace magi {
inline namespace putting {  // named, because nvcc puts the path of the file into the names of what
                            // has no name

constexpr int kPutStages = 5;
constexpr int kSignalDelay =
    3;  // chunks between the last of a signal and its signal: how long stores are on their way
constexpr int kZeros = Stages<kPutStages>::kSmem;  // where a stage of zeros begins
constexpr int kPutSmem = kZeros + kStageBytes;
static_assert(kZeros % 16 == 0, "bulk copies read there");

// The rows of `done` transfers of a signal have arrived. Who counts the last one tells the
// receiver, and only there a fence reaches beyond this GPU: it takes microseconds while others
// write.
__device__ __forceinline__ void count_transfers(const magi_symm_put_params& p, int own_signal,
                                                int4 signal, int done, uint32_t epoch) {
  uint32_t* left = symm_word(p.buffer.own, MAGI_SYMM_SENT(p.world, own_signal));
  __threadfence();
  if (atomicAdd(left, done) + done != static_cast<uint32_t>(signal.z)) return;
  __threadfence();
  *left = 0;
  store_release_system(symm_word(p.buffer.of_rank[signal.x], MAGI_SYMM_SIGNAL(p.world, signal.y)),
                       epoch);
}

// One lane: chunks of transfers, which are taken from a counter, as beside attention some CTAs are
// half as fast as others. The number of a transfer is asked for two ahead and the transfer one
// ahead.
__device__ void load_transfers(const magi_symm_put_params& p, const Stages<kPutStages>& stages) {
  uint32_t* counter = symm_word(p.buffer.own, MAGI_SYMM_NEXT_TRANSFER(p.world));
  auto take = [&] { return static_cast<int>(gridDim.x + atomicAdd(counter, 1)); };
  auto transfer_of = [&](int i) {
    return i < p.num_transfers ? __ldg(reinterpret_cast<const int4*>(p.transfers) + i)
                               : make_int4(0, 0, 0, 0);
  };
  ChunkLoader<kPutStages> loader{stages};
  int index = blockIdx.x, next = take();
  int4 transfer = transfer_of(index);
  while (index < p.num_transfers) {
    const int4 signal = __ldg(reinterpret_cast<const int4*>(p.signals) + transfer.x),
               next_transfer = transfer_of(next);
    const int after = next < p.num_transfers ? take() : next;
    char* buffer = reinterpret_cast<char*>(p.buffer.of_rank[signal.x]);
    for_chunks(p, transfer.w, [&](int t, int row, int rows, int column, int bytes) {
      const int64_t row_bytes = p.row_bytes[t], stride = p.source_stride[t];
      const bool ends_transfer =
          t + 1 == p.num_tensors && row + rows == transfer.w && column + bytes == row_bytes;
      char* to = buffer + p.data_at[t] + (transfer.z + row) * row_bytes + column;
      const bool are_zeros = transfer.y < 0;  // which are in a stage of their own
      const char* from =
          are_zeros ? nullptr
                    : static_cast<const char*>(p.source[t]) + (transfer.y + row) * stride + column;
      loader.put(Chunk{to, bytes, rows, bytes, transfer.x, ends_transfer, are_zeros, signal}, from,
                 stride);
    });
    index = next, next = after, transfer = next_transfer;
  }
  loader.end();
}

// Another: stores, and when those of a signal have arrived its signal.
__device__ void store_transfers(const magi_symm_put_params& p, const Stages<kPutStages>& stages,
                                uint32_t epoch) {
  ChunkStorer<kPutStages> storer{stages};
  int signal = -1, done = 0;  // the signal at hand, and transfers of it that have been stored
  int waiting = 0, waiting_slot = 0,
      since = 0;  // transfers to be signalled, and chunks stored since
  int4 receiver = make_int4(0, 0, 0, 0), waiting_for = receiver;
  auto send_signal = [&] {
    if (waiting > 0) count_transfers(p, waiting_slot, waiting_for, waiting, epoch);
    waiting = 0;
  };
  auto end_slot = [&] {
    if (waiting > 0) {
      store_wait_all();
      send_signal();
    }
    waiting = done, waiting_slot = signal, waiting_for = receiver, since = 0, done = 0;
  };
  for (Chunk chunk = storer.next(); chunk.rows > 0; chunk = storer.next()) {
    if (chunk.own_signal != signal) {
      if (signal >= 0) end_slot();
      signal = chunk.own_signal, receiver = chunk.signal;
    }
    storer.store(chunk, chunk.are_zeros ? stages.smem + kZeros : stages.stage(storer.stored));
    done += chunk.ends_transfer;
    if (waiting > 0 && ++since == kSignalDelay) {
      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kSignalDelay) : "memory");
      send_signal();
    }
  }
  if (signal >= 0) end_slot();
  store_wait_all();
  send_signal();
}

__global__ void __launch_bounds__(kMoveThreads, 1)
    symm_put(const __grid_constant__ magi_symm_put_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ Chunk chunks[kPutStages];
  const Stages<kPutStages> stages{smem_addr(raw), chunks};
  const uint32_t epoch = *symm_word(p.buffer.own, MAGI_SYMM_EPOCH) + 1;
  if (threadIdx.x == 0) stages.init();
  for (int i = threadIdx.x; i < kStageBytes / 16; i += kMoveThreads)
    reinterpret_cast<uint4*>(raw + kZeros)[i] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  // What the receivers have of the epoch before must be over.
  for (int peer = threadIdx.x; peer < p.world; peer += kMoveThreads) {
    if (peer == p.rank) continue;
    wait_for_word(symm_word(p.buffer.own, MAGI_SYMM_CREDIT(p.world, peer)), epoch - 1, p.timeout_ms,
                  p.failed_peer, peer);
    if (p.also_free.own == nullptr) continue;
    const uint32_t over = *symm_word(p.also_free.own, MAGI_SYMM_EPOCH);
    wait_for_word(symm_word(p.also_free.own, MAGI_SYMM_CREDIT(p.world, peer)), over, p.timeout_ms,
                  p.failed_peer, peer);
  }
  __syncthreads();
  // From here on this CTA holds its multiprocessor until it is done, whatever the next kernel
  // takes.
  start_next_kernel();
  if (threadIdx.x == 32) load_transfers(p, stages);
  if (threadIdx.x != 0) return;
  store_transfers(p, stages, epoch);
  uint32_t* ctas = symm_word(p.buffer.own, MAGI_SYMM_REDUCE_CTAS);
  __threadfence();
  if (atomicAdd(ctas, 1) + 1 != gridDim.x) return;
  *ctas = 0;
  *symm_word(p.buffer.own, MAGI_SYMM_NEXT_TRANSFER(p.world)) = 0;
  __threadfence();
  store_release_system(symm_word(p.buffer.own, MAGI_SYMM_PUT_DONE), epoch);
}

}  // namespace putting
}  // namespace magi

extern "C" {

int64_t magi_symm_control_bytes(int32_t world) {
  return ((MAGI_SYMM_NEXT_TRANSFER(world) + 1) * static_cast<int64_t>(MAGI_SYMM_WORD_BYTES) +
          1023) /
         1024 * 1024;
}

magi_status magi_symm_put(const magi_symm_put_params* params) {
  const magi_symm_put_params& p = *params;
  MAGI_RETURN(magi::check_moved_rows(p, p.source_stride, p.source));
  static magi::DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(magi::symm_put, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                magi::kPutSmem);
  }));
  magi::symm_put<<<p.num_ctas, magi::kMoveThreads, magi::kPutSmem,
                   static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the put of rows");
}
}
