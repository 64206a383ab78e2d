// SPDX-License-Identifier: Apache-2.0
// Sum of rows that other ranks wrote into this rank's buffer, in the order of the ranks, see
// magi/symm.h.

#include <algorithm>

#include "ffa/common/host.h"
#include "comm/symm/signal.cuh"
#include "comm/symm/launch.h"
#include "comm/symm/accumulate.cuh"

namespace magi {
inline namespace reducing {  // named, because nvcc puts the path of the file into the names of what
                             // has no name

constexpr int kReduceThreads = 256;
constexpr int kTileRows = 128;

// All rows are there, so threads that have eight values each, as many as a multiprocessor takes,
// keep more loads on their way than warps that have whole rows.
__global__ void __launch_bounds__(kReduceThreads)
    symm_reduce(const __grid_constant__ magi_symm_reduce_params p) {
  const ReducedRows all{p.src_rows,   p.rows,       p.world,    p.rank,
                        p.wire_dtype, p.base_dtype, p.out_dtype};
  for (int t = 0; t < p.num_tensors; ++t) {
    // What this rank adds itself, if anything, lies in its buffer as well.
    const ReducedTensor of{static_cast<const char*>(p.buffer.own) + p.data_at[t],
                           nullptr,
                           p.base[t],
                           p.out[t],
                           0,
                           p.row_values[t]};
    const int per_row = p.row_values[t] / 8;
    const int64_t total = static_cast<int64_t>(p.rows) * per_row,
                  step = static_cast<int64_t>(gridDim.x) * kReduceThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x; i < total;
         i += step) {
      const int row = static_cast<int>(i / per_row),
                column = static_cast<int>(i - static_cast<int64_t>(row) * per_row);
      const int to = __ldg(p.tiles + row / kTileRows) * kTileRows + row % kTileRows;
      if (to >= p.out_rows) continue;
      if (p.wire_dtype == MAGI_FP32)
        sum_part<1, true>(all, of, row, column, to);
      else
        sum_part<1, false>(all, of, row, column, to);
    }
  }
  // The last CTA ends the epochs.
  if (!is_last_cta(symm_word(p.buffer.own, MAGI_SYMM_REDUCE_CTAS))) return;
  __threadfence_system();
  release_buffer(p.buffer, p.rank, p.world);
  if (p.put_buffer.own != nullptr)
    release_put_buffer(p.put_buffer, p.rank, p.world, p.timeout_ms, p.failed_peer);
}

}  // namespace reducing
}  // namespace magi

extern "C" magi_status magi_symm_reduce(const magi_symm_reduce_params* params) {
  const magi_symm_reduce_params& p = *params;
  MAGI_RETURN(magi::check_call(p));
  if (p.rows < 0 || p.rows % magi::kTileRows)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d rows; give whole tiles of %d.", p.rows,
                      magi::kTileRows);
  int64_t most = 1;
  for (int t = 0; t < p.num_tensors; ++t) {
    if (p.row_values[t] < 8 || p.row_values[t] % 8 || p.data_at[t] % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "Rows of tensor %d have %d values; they must be multiples of 8.", t,
                        p.row_values[t]);
    most = std::max(most, static_cast<int64_t>(p.rows) * (p.row_values[t] / 8));
  }
  int sms = 0;
  MAGI_RETURN(magi::multiprocessors(&sms));
  const int64_t wanted = (most + magi::kReduceThreads - 1) / magi::kReduceThreads;
  const int grid = static_cast<int>(std::min<int64_t>(wanted, 8ll * sms));
  magi::symm_reduce<<<grid, magi::kReduceThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  MAGI_RETURN(magi::cuda_status(cudaGetLastError(), "launching the sum of rows"));
  return magi::record_end(p.event, p.stream);
}
