// SPDX-License-Identifier: Apache-2.0
// Sums of the rows of a node in a fixed order, on their way to the owner, see magi/comm.h.

#include "comm/exchange/verbs.cuh"
#include "comm/symm/accumulate.cuh"

namespace magi {
namespace comm {

constexpr int kCommSumThreads = 512;

// By a CTA: the sums of a block to `to`. A thread has a few columns of a row, so that several loads
// of each term are on their way; the columns of neighbours are neighbours.
template <bool kIsFloat>
__device__ __forceinline__ void sum_block(const magi_comm_sum_params& p, const int64_t* block,
                                          char* to) {
  constexpr int kColumns = kIsFloat ? 2 : 4;  // of eight values
  const int per_row = p.row_values / 8, step = (per_row + kColumns - 1) / kColumns;
  const int count = static_cast<int>(block[1]) * step;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int row = i / step, column = i % step;
    const int64_t* begins = p.begins + block[0] + row;
    const int64_t end = begins[1];
    float sum[kColumns][8];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) load_sum(sum[c], nullptr, 0, MAGI_FP32);
#pragma unroll 1
    for (int64_t t = begins[0]; t < end; ++t) {
      const char* from = place(p.epoch, p.terms[t]);
      Eight<kIsFloat> x[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column + c * step < per_row)
          x[c].load(from + (column + c * step) * (kIsFloat ? 32 : 16));
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column + c * step < per_row) x[c].add_to(sum[c], p.wire_dtype);
    }
    const int64_t at = static_cast<int64_t>(row) * p.row_values;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (column + c * step < per_row)
        store_sum(sum[c], to, at + 8 * (column + c * step), p.wire_dtype);
  }
}

__global__ void __launch_bounds__(kCommSumThreads)
    comm_sum(const __grid_constant__ magi_comm_sum_params p) {
  const Network network(p.epoch);
#pragma unroll 1
  for (int i = blockIdx.x; i < p.num_blocks; i += gridDim.x) {
    const int64_t* block = p.blocks + static_cast<int64_t>(i) * MAGI_COMM_BLOCK_WORDS;
    const int64_t* waits = p.waits + block[7] * MAGI_COMM_WAIT_WORDS;
    if (!wait_for_all<false>(network, p.epoch, waits, block[8] - block[7])) break;
    const int owner = static_cast<int>(block[5]);
    char* there = network.near(block[3], owner);
    char* to = there == nullptr ? place(p.epoch, block[2]) : there;
    if (p.wire_dtype == MAGI_FP32)
      sum_block<true>(p, block, to);
    else
      sum_block<false>(p, block, to);
    if (there != nullptr) {
      signal_stores(network, p.epoch, block[6], owner);
      continue;
    }
    __threadfence_system();  // a network card may read the sums
    __syncthreads();
    network.put(block[3], block[2], block[4], signal_at(p.epoch, block[6]), owner);
  }
  network.drain();
}

}  // namespace comm
}  // namespace magi

extern "C" magi_status magi_comm_sum(const magi_comm_sum_params* params) {
  const magi_comm_sum_params& p = *params;
  MAGI_RETURN(magi_comm_check(p.version));
  if (p.num_blocks < 0 || p.num_ctas < 1 || p.row_values < 8 || p.row_values % 8)
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "%d blocks of rows of %d values by %d CTAs; rows have a multiple of 8 values.",
        p.num_blocks, p.row_values, p.num_ctas);
  if (p.wire_dtype != MAGI_BF16 && p.wire_dtype != MAGI_FP16 && p.wire_dtype != MAGI_FP32)
    return magi::fail(MAGI_INVALID_ARGUMENT, "dtype %d; sums are of bf16, fp16 or fp32.",
                      p.wire_dtype);
  magi::comm::
      comm_sum<<<p.num_ctas, magi::comm::kCommSumThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
          p);
  return magi::cuda_status(cudaGetLastError(), "launching sums");
}
