// SPDX-License-Identifier: Apache-2.0
// Sums of the rows of a node in a fixed order, on their way to the owner, see magi/comm.h.

#include "comm/exchange_verbs.cuh"
#include "comm/symm/accumulate.cuh"

namespace magi {
namespace comm {

constexpr int kCommSumThreads = 512;

template <bool kIsFloat>
__device__ __forceinline__ void sum_block(const magi_comm_sum_params& p, const int64_t* block) {
  const int per_row = p.row_values / 8;
  char* to = place(p.epoch, block[2]);
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < block[1] * per_row; i += blockDim.x) {
    const int64_t row = i / per_row, column = i % per_row;
    const int64_t* begins = p.begins + block[0] + row;
    const int64_t end = begins[1];
    float sum[8];
    load_sum(sum, nullptr, 0, MAGI_FP32);
#pragma unroll 2
    for (int64_t t = begins[0]; t < end; ++t) {
      Eight<kIsFloat> x;
      x.load(place(p.epoch, p.terms[t]) + column * (kIsFloat ? 32 : 16));
      x.add_to(sum, p.wire_dtype);
    }
    store_sum(sum, to, row * p.row_values + 8 * column, p.wire_dtype);
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
    if (p.wire_dtype == MAGI_FP32)
      sum_block<true>(p, block);
    else
      sum_block<false>(p, block);
    __threadfence_system();  // a network card may read the sums
    __syncthreads();
    network.put(block[3], block[2], block[4], signal_at(p.epoch, block[6]),
                static_cast<int>(block[5]));
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
