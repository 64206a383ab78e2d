// SPDX-License-Identifier: Apache-2.0
// Rows moved by bulk copies through stages of shared memory: one lane of a CTA has chunks loaded, a
// lane of another warp stores them. What to store where is computed by the one that loads: a lane
// alone is slow at it, and the other has to keep stores coming.
#pragma once

#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "magi/symm.h"

namespace magi {

constexpr int kStageBytes = 32768;
constexpr int kMoveThreads = 64;  // two warps

// What is in a stage, and where it goes: rows of so many bytes, `stride` apart there.
struct Chunk {
  char* to;
  int64_t stride;
  int32_t rows, bytes;  // no rows: there are no more chunks
  // For a put: the signal, with what the table says of it; whether a transfer ends here, and
  // whether it is zeros, which are not loaded.
  int32_t own_signal, ends_transfer, are_zeros;
  int4 signal;
};

template <int kStages>
struct Stages {
  static constexpr int kSmem = kStages * kStageBytes + 16 * kStages;
  uint32_t smem;
  Chunk* chunks;  // (kStages,) in shared memory

  __device__ __forceinline__ uint32_t stage(int n) const {
    return smem + n % kStages * kStageBytes;
  }
  __device__ __forceinline__ uint32_t full(int n) const {
    return smem + kStages * kStageBytes + 8 * (n % kStages);
  }
  __device__ __forceinline__ uint32_t empty(int n) const { return full(n) + 8 * kStages; }
  __device__ __forceinline__ int phase(int n) const { return n / kStages & 1; }
  // By one thread, before any other is at the stages.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2 * kStages; ++i) mbar_init(full(0) + 8 * i, 1);
    mbar_init_fence();
  }
};

// The lane that loads.
template <int kStages>
struct ChunkLoader {
  const Stages<kStages>& stages;
  int loaded = 0;

  // Rows that lie `stride` bytes apart at `from`; NULL: nothing is loaded.
  __device__ __forceinline__ void put(const Chunk& chunk, const char* from, int64_t stride) {
    mbar_wait(stages.empty(loaded), stages.phase(loaded) ^ 1);
    stages.chunks[loaded % kStages] = chunk;
    const uint32_t to = stages.stage(loaded), full = stages.full(loaded);
    mbar_expect(full, from == nullptr
                          ? 0
                          : chunk.rows * chunk.bytes);  // behind this the other lane sees the chunk
    ++loaded;
    if (from == nullptr) return;
    if (chunk.bytes == stride) return load_bytes(to, from, chunk.rows * chunk.bytes, full);
    for (int i = 0; i < chunk.rows; ++i)
      load_bytes(to + i * chunk.bytes, from + i * stride, chunk.bytes, full);
  }
  __device__ __forceinline__ void end() { put(Chunk{}, nullptr, 0); }
};

// The lane that stores.
template <int kStages>
struct ChunkStorer {
  const Stages<kStages>& stages;
  int stored = 0;

  // The next chunk, when it is there.
  __device__ __forceinline__ Chunk next() const {
    mbar_wait(stages.full(stored), stages.phase(stored));
    return stages.chunks[stored % kStages];
  }
  // Stores what lies at `from` in shared memory; and gives the stage before back when its store has
  // read it.
  __device__ __forceinline__ void store(const Chunk& chunk, uint32_t from) {
    if (chunk.bytes == chunk.stride)
      store_bytes(chunk.to, from, chunk.rows * chunk.bytes);
    else
      for (int i = 0; i < chunk.rows; ++i)
        store_bytes(chunk.to + i * chunk.stride, from + i * chunk.bytes, chunk.bytes);
    store_commit();
    store_wait_read_but_one();
    if (stored > 0) mbar_arrive(stages.empty(stored - 1));
    ++stored;
  }
};

// Calls `run(tensor, row, rows, column, bytes)` for each chunk of so many rows of all tensors: as
// many whole rows as fit into a stage, or a part of one.
template <typename P, typename Run>
__device__ __forceinline__ void for_chunks(const P& p, int rows, Run run) {
#pragma unroll 1
  for (int t = 0; t < p.num_tensors; ++t) {
    const int row_bytes = static_cast<int>(p.row_bytes[t]), fit = max(kStageBytes / row_bytes, 1);
#pragma unroll 1
    for (int row = 0; row < rows; row += fit)
#pragma unroll 1
      for (int column = 0; column < row_bytes; column += kStageBytes)
        run(t, row, min(fit, rows - row), column, min(kStageBytes, row_bytes - column));
  }
}

}  // namespace magi
