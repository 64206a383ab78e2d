// SPDX-License-Identifier: Apache-2.0
// FFA backward for sm_90a. A CTA takes a tile of 128 keys of one kv head and visits all queries
// that see it, of all query heads in the group: dk and dv stay in registers and are written once,
// without atomics. dq is summed in float32 in L2:
// * by vector reductions straight from the registers;
// * by bulk copies in m-blocks of 80 or 128 queries in place of 64 (kIsWide);
// * by bulk copies in a fixed order, or after the first writer's store (kSemaphored, see
//   bwd/schedule/semaphore_targets.cuh).
// Where a block has a single contribution it is written at once (kDirectStore).
#pragma once

#include "ffa/sm90/bwd/epilogue.cuh"
#include "ffa/sm90/bwd/mainloop.cuh"
#include "ffa/sm90/bwd/producer.cuh"
#include "ffa/sm90/bwd/producer/dq_store.cuh"
#include "ffa/sm90/bwd/producer/row_guard.cuh"
#include "ffa/sm90/bwd/producer/work_tiles.cuh"

namespace magi {

template <typename C>
__device__ void compute_grads(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  // With two passes dk and dv have the same registers.
  constexpr bool kBoth = C::kPasses == 1;
  float dk[C::kD / 2], dv[kBoth ? C::kDv / 2 : 1];
  StepWorker<C> worker(p, smem);
  while (true) {
    mbar_wait(smem.work_full(worker.state().work_stage()), worker.state().work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(worker.state().work_stage()));
    if (uniform(work_tile.x) < 0) break;
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; kBoth && i < C::kDv / 2; ++i) dv[i] = 0.f;
    mbar_wait(smem.kv_full(), worker.state().kv_phase());
    const bool walks = uniform(work_tile.z) > 0;
    if (worker.makes_dq()) {
      if (walks) walk_steps<C>(worker, dk, dv);
      worker.finish(dk, dv);
    } else {
      typename StepWorker<C>::Packed packed;  // is read while the next step begins
      while (walks && worker.step_dv(dk, packed)) {
      }
      worker.finish_dv(dk);
    }
    // Tile and head are read again rather than kept in registers.
    const int4 again = lds_int4(smem.work_tile(worker.state().work_stage()));
    // With a work list this also says that what was split has been written.
    const bool is_listed = C::kWorkList && p.work_list != nullptr;
    auto release_work_tile = [&] {
      __syncwarp();
      if (elect_one()) mbar_arrive(smem.work_empty(worker.state().work_stage()));
    };
    if (!is_listed) release_work_tile();
    named_barrier(kDsBarrier, 128 * C::kGroups);  // both warpgroups are through with K
    const GradPlace at{uniform(again.x), uniform(again.y), uniform(again.w)};
    if constexpr (kBoth)
      write_grads<C>(p, smem, at, dk, dv);
    else if (makes_dq<C>(at.word))
      write_grads<C>(p, smem, at, dk, NoGrad{});
    else
      write_grads<C>(p, smem, at, NoGrad{}, columns_of<C::kDv>(dk));
    if (is_listed) release_work_tile();
    worker.next_work();
  }
  if (thread_again() % 128 == 0) store_wait_all();
}

// For a plan that did not fit into its buffer or belongs to other shapes.
template <typename C>
__device__ void write_nan_grads(const BwdKernelParams& p) {
  const float nan = __int_as_float(0x7fffffff);
  for (int grad = 0; grad < 2; ++grad) {
    void* to = grad ? p.dv : p.dk;
    const int64_t count =
        static_cast<int64_t>(p.remote.local_keys) * p.heads_kv * (grad ? p.head_dim_v : p.head_dim);
    for (int64_t i = blockIdx.x * C::kThreads + threadIdx.x; i < count;
         i += gridDim.x * C::kThreads) {
      const int row_values = p.heads_kv * (grad ? p.head_dim_v : p.head_dim),
                key = static_cast<int>(i / row_values);
      if (const int summed = summed_tile(p.remote, key / kRemoteTile); summed >= 0) {
        const int64_t first =
            (static_cast<int64_t>(summed) * kRemoteTile + key % kRemoteTile) * row_values;
        (grad ? p.remote.dv_sums : p.remote.dk_sums)[first + i % row_values] = nan;
      } else if (p.grads_are_float)
        static_cast<float*>(to)[i] = nan;
      else
        static_cast<typename C::T*>(to)[i] = typename C::T(nan);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    ffa_bwd(const __grid_constant__ BwdKernelParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const bool is_listed = C::kWorkList && p.work_list != nullptr;
  // In order the last kernel looks at counters that the kernels before this one clear.
  if (!C::kSemaphored) start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) {
    wait_for_kernel_before();  // or the next kernel would not wait for it either
    write_nan_grads<C>(p);
    return;
  }
  const BwdSmem<C> smem;
  if (smem_addr(raw) != smem.base) __trap();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    smem.init_barriers(has_unseen(p));
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.v_map);
    prefetch_tensor_map(&p.do_map);
  }
  __syncthreads();
  // With a work list, rows are waited for block by block.
  if (!is_listed) wait_for_kernel_before();
  if constexpr (C::kSemaphored) start_next_kernel();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_queries<C>(p, smem);
    if (threadIdx.x == 32) {
      if constexpr (C::kSemaphored)
        store_dq<C>(p, smem);
      else
        schedule_bwd<C>(p, smem);
    }
    if (threadIdx.x == 96) copy_keys_store_dq<C>(p, smem);
    if (threadIdx.x / 32 == 2) zero_masked_rows<C>(p, smem, threadIdx.x % 32);
  } else {
    registers_grow<C::kConsumerRegisters>();
    compute_grads<C>(p, smem);
  }
}

}  // namespace magi
