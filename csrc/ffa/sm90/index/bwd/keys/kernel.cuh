// SPDX-License-Identifier: Apache-2.0
// Backward of index attention for sm_90a that is key-stationary. A CTA takes a tile of 128 keys of
// one kv head and iterates over the blocks of 64 queries that see any of them, of some or all query
// heads of the group: dk and dv stay in registers and are written once, dq is added in float32 in
// L2. A step is that of the dense backward (bwd/mainloop/step.cuh), but for its mask.
#pragma once

#include "ffa/sm90/index/bwd/keys/epilogue.cuh"
#include "ffa/sm90/index/bwd/keys/listed_step.cuh"
#include "ffa/sm90/index/bwd/keys/producer.cuh"

namespace magi {

template <typename C, bool kHasHalves>
__device__ void compute_listed_grads(const IndexKeysParams& p, const BwdSmem<C>& smem) {
  using Worker = ListedStepWorker<C, kHasHalves>;
  float dk[C::kD / 2], dv[C::kD / 2];
  Worker worker(p, smem);
  while (true) {
    mbar_wait(smem.work_full(worker.state().work_stage()), worker.state().work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(worker.state().work_stage()));
    if (uniform(work_tile.x) < 0) break;
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.f;
    mbar_wait(smem.kv_full(), worker.state().kv_phase());
    typename Worker::DqRest rest;
#pragma unroll
    for (int i = 0; i < DqColumns<C>::kRest; ++i) rest[i] = 0.f;
    if (uniform(work_tile.z) > 0) {
      mbar_wait(smem.q_full(worker.ring.stage), worker.ring.phase);  // the words of the step, too
      uint32_t rest_of = worker.dq_block();  // nothing yet, but an address is needed
      while (worker.listed_step(dk, dv, rest, rest_of)) {
      }
      worker.columns().add_rest(rest, rest_of);
    }
    worker.finish(dk, dv);
    // Read again rather than kept in registers.
    const int4 again = lds_int4(smem.work_tile(worker.state().work_stage()));
    __syncwarp();
    if (elect_one()) mbar_arrive(smem.work_empty(worker.state().work_stage()));
    named_barrier(kDsBarrier, 128 * C::kGroups);  // both warpgroups are through with K
    write_or_pass_on<C>(
        p, smem, dk, dv,
        make_int4(uniform(again.x), uniform(again.y), uniform(again.z), uniform(again.w)));
    worker.next_work();
  }
  if (thread_again() % 128 == 0) store_wait_all();
}

// `kHasHalves`: key blocks may fill one half of a tile and not the other.
template <typename C, bool kHasHalves>
__global__ void __launch_bounds__(C::kThreads, 1)
    index_bwd_keys(const __grid_constant__ IndexKeysParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  start_next_kernel();
  const BwdSmem<C> smem;
  if (smem_addr(raw) != smem.base) __trap();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    smem.init_barriers(false);
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.v_map);
    prefetch_tensor_map(&p.do_map);
  }
  __syncthreads();
  wait_for_kernel_before();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_listed_queries<C>(p, smem);
    if (threadIdx.x == 32) schedule_tiles<C>(p, smem);
    if (threadIdx.x == 96) copy_keys<C>(p, smem);
    if (threadIdx.x / 32 == 2) clear_unseen_keys<C>(smem, threadIdx.x % 32);
  } else {
    registers_grow<C::kConsumerRegisters>();
    compute_listed_grads<C, kHasHalves>(p, smem);
  }
}

}  // namespace magi
