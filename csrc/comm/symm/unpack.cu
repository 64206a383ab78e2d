// SPDX-License-Identifier: Apache-2.0
// Rows out of this rank's buffer to their src_rows in ordinary tensors, as they arrive, see
// magi/symm.h. By bulk copies, which take fewer CTAs than loads and stores.

#include "ffa/common/host.h"
#include "comm/symm/signal.cuh"
#include "comm/symm/launch.h"
#include "comm/symm/pipeline.cuh"

namespace magi {
inline namespace unpacking {  // named, because nvcc puts the path of the file into the names of
                              // what has no name

constexpr int kUnpackStages = 6;
constexpr int kUnpackSmem = Stages<kUnpackStages>::kSmem;

// One lane: chunks of transfers, each when its signal has arrived.
__device__ void load_transfers(const magi_symm_unpack_params& p,
                               const Stages<kUnpackStages>& stages, uint32_t epoch) {
  auto transfer_of = [&](int i) {
    return i < p.num_transfers ? __ldg(reinterpret_cast<const int4*>(p.transfers) + i)
                               : make_int4(-1, 0, 0, 0);
  };
  int there = -1;  // the last signal that has been waited for
  ChunkLoader<kUnpackStages> loader{stages};
  int4 transfer = transfer_of(blockIdx.x);
  for (int i = blockIdx.x; i < p.num_transfers; i += gridDim.x) {
    const int4 next = transfer_of(i + gridDim.x);
    if (transfer.x != there) {
      there = transfer.x;
      wait_for_word(symm_word(p.buffer.own, MAGI_SYMM_SIGNAL(p.world, there)), epoch, p.timeout_ms,
                    p.failed_peer, there / MAGI_SYMM_SIGNALS_PER_RANK);
      fence_proxies();  // other GPUs wrote what bulk copies read
    }
    for_chunks(p, transfer.w, [&](int t, int row, int rows, int column, int bytes) {
      const int64_t row_bytes = p.row_bytes[t], stride = p.out_stride[t];
      const char* from = static_cast<const char*>(p.buffer.own) + p.data_at[t] +
                         (transfer.y + row) * row_bytes + column;
      char* to = static_cast<char*>(p.out[t]) + (transfer.z + row) * stride + column;
      loader.put(Chunk{to, stride, rows, bytes}, from, row_bytes);
    });
    transfer = next;
  }
  loader.end();
}

__device__ void store_transfers(const Stages<kUnpackStages>& stages) {
  ChunkStorer<kUnpackStages> storer{stages};
  for (Chunk chunk = storer.next(); chunk.rows > 0; chunk = storer.next())
    storer.store(chunk, stages.stage(storer.stored));
  store_wait_all();
}

// Starts beside this rank's put, in few CTAs: each waits for the signal of its next transfer and
// holds its src_row meanwhile.
__global__ void __launch_bounds__(kMoveThreads, 1)
    symm_unpack(const __grid_constant__ magi_symm_unpack_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ Chunk chunks[kUnpackStages];
  const Stages<kUnpackStages> stages{smem_addr(raw), chunks};
  const uint32_t epoch = *symm_word(p.buffer.own, MAGI_SYMM_EPOCH) + 1;
  if (threadIdx.x == 0) stages.init();
  __syncthreads();
  if (threadIdx.x == 32) load_transfers(p, stages, epoch);
  if (threadIdx.x == 0) store_transfers(stages);
  __syncthreads();
  end_epoch(p);
}

}  // namespace unpacking
}  // namespace magi

extern "C" magi_status magi_symm_unpack(const magi_symm_unpack_params* params) {
  const magi_symm_unpack_params& p = *params;
  MAGI_RETURN(magi::check_moved_rows(p, p.out_stride, p.out));
  if (p.num_transfers < 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d transfers; give 0 or more.", p.num_transfers);
  static magi::DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(magi::symm_unpack, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                magi::kUnpackSmem);
  }));
  return magi::launch_behind(magi::symm_unpack, dim3(p.num_ctas), magi::kMoveThreads,
                             magi::kUnpackSmem, p.stream, p, "launching the copy out of a buffer");
}
