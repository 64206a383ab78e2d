// SPDX-License-Identifier: Apache-2.0
// Sums of rows that other ranks put into this rank's buffer, as they arrive, in the order of the
// ranks, see magi/symm.h.

#include "ffa/common/host.h"
#include "comm/symm/signal.cuh"
#include "comm/symm/launch.h"
#include "comm/symm/accumulate.cuh"

namespace magi {
inline namespace recv_reducing {  // named, because nvcc puts the path of the file into the names of
                                  // what has no name

constexpr int kReduceWarps = 15;  // and one that looks what has arrived
constexpr int kRecvReduceThreads = 32 * (kReduceWarps + 1);

// By one warp: what has arrived, to shared memory, a bit for each signal of each rank; so that few
// look at words that others write. A lane looks at the signals of a rank in their order, which is
// that of sending.
__device__ __forceinline__ void watch_arrivals(const magi_symm_recv_reduce_params& p,
                                               uint32_t epoch, volatile uint32_t* arrived) {
  for (int first = 0; first < p.world; first += 32) {
    const int peer = first + threadIdx.x % 32;
    const uint32_t all =
        peer < p.world ? __ldg(reinterpret_cast<const uint32_t*>(p.signals) + peer) : 0;
    uint32_t missing = all, begun = milliseconds(), last = begun;
    while (__any_sync(0xffffffff, missing != 0)) {
      bool has_come = false;
      if (missing != 0) {
        const int signal = __ffs(missing) - 1;
        has_come = static_cast<int32_t>(
                       load_acquire_system(symm_word(
                           p.buffer.own,
                           MAGI_SYMM_SIGNAL(p.world, MAGI_SYMM_SIGNALS_PER_RANK * peer + signal))) -
                       epoch) >= 0;
        const uint32_t now = milliseconds();
        if (has_come) {
          missing &= missing - 1;
          begun = last = now;
        } else if (now != last) {
          last = now;
          if (has_failed(p.timeout_ms, p.failed_peer, peer, now - begun))
            missing = 0, has_come = true;
        }
      }
      if (has_come) {
        __threadfence_block();
        arrived[peer] = all & ~missing;
      }
      if (!__any_sync(0xffffffff, has_come)) __nanosleep(kLookEveryNs / 2);
    }
  }
}

// By a warp: until the signals that blocks of rows need have arrived.
__device__ __forceinline__ void wait_for_rows(const magi_symm_recv_reduce_params& p,
                                              int first_block, int end_block,
                                              const volatile uint32_t* arrived) {
  for (int peer = threadIdx.x % 32; peer < p.world; peer += 32) {
    uint32_t needed = 0;
    for (int block = first_block; block < end_block; ++block)
      needed |= __ldg(reinterpret_cast<const uint32_t*>(p.needed_signals) +
                      static_cast<int64_t>(block) * p.world + peer);
    while ((needed & ~arrived[peer]) != 0) __nanosleep(100);
    __threadfence_block();
  }
  __syncwarp();
}

// Starts beside this rank's put, in few CTAs: each waits for the rows of its next block and holds
// its src_row meanwhile. A warp has a few rows at a time, in the order in which they arrive.
__global__ void __launch_bounds__(kRecvReduceThreads, 1)
    symm_recv_reduce(const __grid_constant__ magi_symm_recv_reduce_params p) {
  extern __shared__ uint32_t arrived[];  // (world,)
  const uint32_t epoch = *symm_word(p.buffer.own, MAGI_SYMM_EPOCH) + 1;
  for (int peer = threadIdx.x; peer < p.world; peer += kRecvReduceThreads) arrived[peer] = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp == kReduceWarps) {
    watch_arrivals(p, epoch, arrived);
  } else {
    const ReducedRows all{p.src_rows,   p.rows,       p.world,    p.rank,
                          p.wire_dtype, p.base_dtype, p.out_dtype};
    int least = p.row_values[0];
    for (int t = 1; t < p.num_tensors; ++t) least = min(least, p.row_values[t]);
    const int rows = rows_of_warp(least), units = (p.rows + rows - 1) / rows;
    for (int unit = blockIdx.x * kReduceWarps + warp; unit < units;
         unit += gridDim.x * kReduceWarps) {
      const int first = unit * rows, count = min(rows, p.rows - first);
      wait_for_rows(p, first / MAGI_SYMM_REDUCE_ROWS,
                    (first + count - 1) / MAGI_SYMM_REDUCE_ROWS + 1, arrived);
      for (int t = 0; t < p.num_tensors; ++t) {
        const ReducedTensor of{static_cast<const char*>(p.buffer.own) + p.data_at[t],
                               static_cast<const char*>(p.own[t]),
                               p.base[t],
                               p.out[t],
                               p.own_stride[t],
                               p.row_values[t]};
        sum_rows(all, of, first, count);
      }
    }
  }
  end_epoch(p);
}

}  // namespace recv_reducing
}  // namespace magi

extern "C" magi_status magi_symm_recv_reduce(const magi_symm_recv_reduce_params* params) {
  const magi_symm_recv_reduce_params& p = *params;
  MAGI_RETURN(magi::check_call(p));
  MAGI_RETURN(magi::check_ctas(p.num_ctas));
  if (p.rows < 0) return magi::fail(MAGI_INVALID_ARGUMENT, "%d rows; give 0 or more.", p.rows);
  for (int t = 0; t < p.num_tensors; ++t)
    if (p.row_values[t] < 8 || p.row_values[t] % 8 || p.data_at[t] % 16 || p.own_stride[t] % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "Rows of tensor %d have %d values, %lld bytes apart; these must be "
                        "multiples of 8 and of 16.",
                        t, p.row_values[t], static_cast<long long>(p.own_stride[t]));
  return magi::launch_behind(magi::symm_recv_reduce, dim3(p.num_ctas), magi::kRecvReduceThreads,
                             4 * p.world, p.stream, p, "launching the sum of rows as they arrive");
}
