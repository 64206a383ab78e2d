// SPDX-License-Identifier: Apache-2.0
// FFA backward for any GPU from sm_80 on. A CTA owns a tile of keys of one kv head, steps through
// the blocks of queries that see it, and writes dk and dv once; dq is added to a sum in float32
// with atomics, in an order that the plan fixes if the call is deterministic.
//
// In deterministic order work tiles are taken up in the order of the tiles, and each waits only for
// tiles of lower number, which have been taken up before: so the order cannot deadlock.
#pragma once

#include "ffa/common/work_order.cuh"
#include "ffa/portable/bwd/order.cuh"
#include "ffa/portable/bwd/worker.cuh"

namespace magi::portable {

// For a plan that did not fit into its buffer, or belongs to other shapes.
template <typename T>
__device__ void write_nan_grads(const BwdKernelParams& p) {
  const float2 nan = make_float2(__int_as_float(0x7fffffff), __int_as_float(0x7fffffff));
  const int64_t rows = static_cast<int64_t>(p.total_k) * p.heads_kv;
  const int64_t step = 2ll * gridDim.x * blockDim.x;
  for (int64_t i = 2ll * (blockIdx.x * blockDim.x + threadIdx.x); i < rows * p.head_dim; i += step)
    write_pair<T>(p.dk, i, nan, p.grads_are_float, 0);
  for (int64_t i = 2ll * (blockIdx.x * blockDim.x + threadIdx.x); i < rows * p.head_dim_v;
       i += step)
    write_pair<T>(p.dv, i, nan, p.grads_are_float, 0);
}

struct BwdWork {
  int tile, kv_head, split;
};

__device__ __forceinline__ BwdWork bwd_work(const BwdKernelParams& p, int work) {
  const magi_tile_plan_header& header = PlanReader{p.plan}.header();
  int order_idx, head_unit;
  work_tile_coords(p, work, &order_idx, &head_unit);
  BwdWork w;
  w.kv_head = head_unit / p.num_head_splits;
  w.split = head_unit - w.kv_head * p.num_head_splits;
  w.tile = p.semaphore != nullptr
               ? order_idx
               : tile_of(p, header.words_order, header.words_first_order, work, order_idx);
  return w;
}

// Threads that do something beside the arithmetic, each of a warp of its own.
constexpr int kSegmentWarp = 0, kOrderWarp = 1, kReleaseWarp = 2;

// The steps of a work tile; on entry its first two segments are in shared memory and what the first
// step needs is on its way. The next step is worked out where it is needed rather than kept.
template <typename C>
__device__ __forceinline__ void run_steps(BwdWorker<C>& worker, uint32_t smem, int tile) {
  const BwdKernelParams& p = worker.p;
  const bool in_order = p.semaphore != nullptr;
  Step step{first_segment<C>(smem), last_block(first_segment<C>(smem))};
  int stage = 0;
  int released = kNoBlock;  // whose semaphore is to be set when the step is over
  copy_wait<0>();
  __syncthreads();
  worker.zero_unseen_keys(tile);
  while (step.block >= 0) {
    copy_wait<0>();
    __syncthreads();  // the operands have arrived; what the step before read is free
    if (in_order && threadIdx.x == 32 * kReleaseWarp) release_block(p, released, tile);
    if (C::kStages == 2) worker.copy_queries(step_behind<C>(smem, step), stage ^ 1);
    if (threadIdx.x == 32 * kSegmentWarp && step.block == last_block(step.segment))
      follow_segment<C>(p, smem, segment_behind<C>(smem, step.segment));
    if (in_order && threadIdx.x / 32 == kOrderWarp)
      find_order<C>(p, smem, step.segment, step.block, threadIdx.x % 32);
    if (may_be_unseen<C>(step.segment, step.block)) {
      worker.zero_unseen_queries(step, stage);
      __syncthreads();
    }
    __syncwarp();
    worker.score(step, stage);
    if (in_order && threadIdx.x == 32 * kOrderWarp)
      wait_for_order<C>(p, smem, worker.block_number(step));
    __syncthreads();  // P and dS are there
    worker.add_dk_dv(stage);
    worker.add_dq(step);
    if (in_order)
      released =
          lds_int(smem + C::kOrderAt + 16) ? static_cast<int>(worker.block_number(step)) : kNoBlock;
    const Step next = step_behind<C>(smem, step);
    if (C::kStages == 1) {
      __syncthreads();
      worker.copy_queries(next, 0);
    } else {
      stage ^= 1;
    }
    step = next;
  }
  __syncthreads();
  if (in_order && threadIdx.x == 32 * kReleaseWarp) release_block(p, released, tile);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    ffa_bwd(const __grid_constant__ BwdKernelParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  if (!PlanReader{p.plan}.fits(p.total_k, p.total_q, C::kBlockN, C::kGroups)) {
    write_nan_grads<typename C::T>(p);
    return;
  }
  const uint32_t smem = shared_address(raw);
  const int total = p.num_tiles * p.head_units;
  const int heads = p.group / p.num_head_splits;
  int work = blockIdx.x;
  while (work < total) {
    const BwdWork w = bwd_work(p, work);
    BwdWorker<C> worker(p, smem);
    worker.copy_key_tiles(w.tile, w.kv_head);
    if (threadIdx.x == 0) {
      start_segments<C>(p, smem, w.tile, w.kv_head * p.group + w.split * heads, heads);
      sts_int(smem + C::kWorkAt, atomicAdd(p.counter, 1) + static_cast<int>(gridDim.x));
    }
    __syncthreads();
    const uint32_t first = first_segment<C>(smem);
    worker.copy_queries(Step{first, last_block(first)}, 0);
    clear(worker.dk);
    clear(worker.dv);
    run_steps<C>(worker, smem, w.tile);
    worker.write_grads(w.tile, w.kv_head, w.split);
    work = lds_int(smem + C::kWorkAt);
    __syncthreads();
  }
}

}  // namespace magi::portable
