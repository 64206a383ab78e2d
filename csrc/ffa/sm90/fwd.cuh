// SPDX-License-Identifier: Apache-2.0
// FFA forward for sm_90a. One CTA owns a query tile and walks all key intervals of its layers, accumulating in
// registers; the output is written once. Warpgroup 0 feeds (a copying lane, a scheduling lane, and a warp that clears V
// rows which no query sees), the others compute.
#pragma once

#include "../common/wgmma.cuh"
#include "fwd_epilogue.cuh"
#include "fwd_feed.cuh"
#include "fwd_softmax.cuh"

namespace magi {

// scores = Q K^T of one block. q and k are low words of descriptors.
template <typename C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kBlockN / 2], uint32_t q, uint32_t k) {
  using Mma = Wgmma<typename C::T, C::kBlockN, 0>;
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int in_atom = (step % 4) * 32, atom = step / 4;
    Mma::ss(s, operand(q, (atom * C::kBlockM * 128 + in_atom) / 16), operand(k, (atom * C::kBlockN * 128 + in_atom) / 16),
            step > 0);
  }
}

// out += P V of one block, P packed in registers. v is the low word of a descriptor.
template <typename C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kDv / 2], const uint32_t (&p)[C::kBlockN / 4], uint32_t v) {
  using Mma = Wgmma<typename C::T, C::kDv, 1>;
#pragma unroll
  for (int step = 0; step < C::kBlockN / 16; ++step) Mma::rs(o, p + 4 * step, operand(v, step * 2048 / 16), 1);
}

// The sequence of key blocks of a unit, as one consumer warpgroup walks it. Inside a layer, from the right: blocks without
// work for the warpgroup, masked ones, plain ones, masked ones, blocks without work. So a block's kind is told by how many
// are left, against four thresholds that are worked out once per layer. Few registers: the row intervals stay in the
// record, which is released when the next layer is entered.
template <typename C>
struct BlockWalk {
  const FwdSmem<C>& smem;
  const int lane, group;
  uint32_t row_at;   // where the intervals of this thread's two rows are in a record: two 16-bit offsets
  uint32_t entered = 0;  // records so far; tells the slot of the next one
  uint32_t at = 0;   // this record
  int layers_left = 0;
  int k0 = 0;        // first key of this block
  int left = 0;      // blocks of the layer from this one on; 0 before the first layer
  uint32_t work = 0, plain = 0;  // this warpgroup's: the kind holds for low half < left <= high half

  __device__ __forceinline__ BlockWalk(const FwdSmem<C>& s, int group_, int thread, int pack)
      : smem(s), lane(thread % 32), group(group_) {
    const int row = 64 * group + 16 * (thread / 32) + lane / 4;
    row_at = (C::kLayerHeader + 8 * (row / pack)) | (C::kLayerHeader + 8 * ((row + 8) / pack)) << 16;
  }

  __device__ __forceinline__ bool has_work() const { return left > (work & 0xffff) && left <= (work >> 16); }
  __device__ __forceinline__ bool masked() const { return left <= (plain & 0xffff) || left > (plain >> 16); }

  __device__ __forceinline__ void start(int num_layers) {
    layers_left = num_layers;
    left = 0;
  }

  // Moves to the next block, with or without work for this warpgroup; false at the end of the unit.
  __device__ __forceinline__ bool next() {
    k0 -= C::kBlockN;
    if (--left > 0) return true;
    if (left == 0 && lane == 0) mbar_arrive(smem.layer_empty((entered - 1) & 1));
    if (layers_left == 0) return false;
    enter_layer();
    return true;
  }

  __device__ __forceinline__ void enter_layer() {
    mbar_wait(smem.layer_full(entered & 1), entered >> 1 & 1);
    at = smem.layer(entered & 1);
    ++entered;
    --layers_left;
    const int2 visit = lds_int2(at);
    const int4 mine = lds_int4(at + 32 + 16 * group);  // visit_lo, visit_hi, full_lo, full_hi
    const int end = visit.y, blocks = (end - visit.x + C::kBlockN - 1) / C::kBlockN;
    // Block with `left` to go covers [end - (blocks - left + 1) * N, end - (blocks - left) * N).
    const int below_hi = blocks - (end - mine.y) / C::kBlockN;              // left <= this: starts below visit_hi
    const int above_lo = blocks - (end - mine.x + C::kBlockN - 1) / C::kBlockN;  // left > this: ends above visit_lo
    const int under = blocks - (end - mine.w + C::kBlockN - 1) / C::kBlockN;     // left <= this: ends at most at full_hi
    const int over = blocks - (mine.z < end ? (end - mine.z) / C::kBlockN : 0);  // left > this: starts at or above full_lo
    const bool any = mine.y > mine.x, full = mine.w > mine.z;
    work = uniform(any ? above_lo | below_hi << 16 : 0);
    plain = uniform(full && under > over ? over | under << 16 : 0);
    left = uniform(blocks);
    k0 = uniform(end) - C::kBlockN;
  }

  __device__ __forceinline__ void mask(float (&s)[C::kBlockN / 2]) const {
    const int2 keys[2] = {lds_int2(at + (row_at & 0xffff)), lds_int2(at + (row_at >> 16))};
    mask_scores<C>(s, k0, keys, lane);
  }
};

// One consumer warpgroup at work on one unit. Three generations of blocks are under way: while the scores of block n are
// multiplied and exponentiated, the output of block n-1 is being accumulated, and the stage of block n-2 is released.
// P is packed into two sets of registers in turn, so that packing never waits for the multiplication that reads the other.
template <typename C>
struct Worker {
  using Packed = uint32_t[C::kBlockN / 4];

  const FwdKernelParams& p;
  const FwdSmem<C>& smem;
  BlockWalk<C>& walk;
  const int group;
  uint32_t blocks = 0;   // so far; tells the stage of K
  Ring<C::kVStages> vs;  // of the next block; the one before is packed, the one before that may be under way
  bool flying = false, more = false;
  bool k_ready = false, v_ready = false;  // what the next block needs has been seen to have arrived

  __device__ __forceinline__ Worker(const FwdKernelParams& params, const FwdSmem<C>& s, BlockWalk<C>& w, int g)
      : p(params), smem(s), walk(w), group(g) {}

  __device__ __forceinline__ uint32_t v_slot(int ago) const {
    return vs.slot >= ago ? vs.slot - ago : vs.slot + C::kVStages - ago;
  }

  __device__ __forceinline__ void start_qk(float (&s)[C::kBlockN / 2], uint32_t q) {
    if (!k_ready) mbar_wait(smem.k_full(blocks & 1), (blocks >> 1) & 1);
    __syncwarp();
    wgmma_fence();
    multiply_qk<C>(s, uniform(q), uniform(operand_low(smem.k(blocks & 1), 16)));
    wgmma_commit();
  }

  // The output of the block that was packed last.
  __device__ __forceinline__ void start_pv(float (&o)[C::kDv / 2], const Packed& packed) {
    const uint32_t slot = v_slot(1);
    if (!v_ready) mbar_wait(smem.v_full(slot), vs.phase ^ (vs.slot == 0));
    __syncwarp();
    wgmma_fence();
    multiply_pv<C>(o, packed, uniform(operand_low(smem.v(slot), C::kBlockN * 128)));
    wgmma_commit();
  }

  __device__ __forceinline__ void release_k() const {
    if (walk.lane == 0) mbar_arrive(smem.k_empty(blocks & 1));
  }

  __device__ __forceinline__ void release_v(int ago) const {
    if (walk.lane == 0) mbar_arrive(smem.v_empty(v_slot(ago)));
  }

  __device__ __forceinline__ void count_block() {
    ++blocks;
    vs.advance();
  }

  // Scores to P, and on to the next block: its bookkeeping hides among the exponentials. True if the output has to be
  // rescaled before it grows.
  __device__ __forceinline__ bool softmax(float (&s)[C::kBlockN / 2], SoftmaxState<C>& state) {
    if (p.has_softcap) cap_scores<C>(s, p.scale);
    if (walk.masked()) walk.mask(s);
    const bool rescale = state.update(s, p.scale_log2, p.slack, group);
    more = walk.next();
    k_ready = mbar_test(smem.k_full((blocks + 1) & 1), ((blocks + 1) >> 1) & 1);
    v_ready = mbar_test(smem.v_full(vs.slot), vs.phase);
    state.exponentiate(s, p.scale_log2);
    return rescale;
  }

  // The first block, or the first after a drain.
  __device__ __forceinline__ void first_block(float (&s)[C::kBlockN / 2], float (&o)[C::kDv / 2], Packed& packed,
                                              SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    wgmma_wait<0>();
    keep_in_place(s);
    release_k();
    if (softmax(s, state)) state.rescale(o);
    pack_scores<C>(packed, s);
    count_block();
    flying = false;
  }

  __device__ __forceinline__ void next_block(float (&s)[C::kBlockN / 2], float (&o)[C::kDv / 2], const Packed& before,
                                             Packed& after, SoftmaxState<C>& state, uint32_t q) {
    start_qk(s, q);
    start_pv(o, before);
    wgmma_wait<1>();  // leaves this output multiplication under way; the one before it is done too
    keep_in_place(s);
    release_k();
    if (flying) release_v(2);
    flying = true;
    const bool rescale = softmax(s, state);
    pack_scores<C>(after, s);
    if (rescale) {
      wgmma_wait<0>();
      keep_in_place(o);
      state.rescale(o);
    }
    count_block();
  }

  // Finishes all multiplications and releases their stages.
  __device__ __forceinline__ void drain(float (&o)[C::kDv / 2], const Packed& packed) {
    start_pv(o, packed);
    wgmma_wait<0>();
    keep_in_place(o);
    if (flying) release_v(2);
    release_v(1);
  }

  // A block without work for this warpgroup; nothing may be under way, or the rings could not move on.
  __device__ __forceinline__ void skip_block() {
    mbar_wait(smem.k_full(blocks & 1), (blocks >> 1) & 1);
    mbar_wait(smem.v_full(vs.slot), vs.phase);
    release_k();
    release_v(0);
    count_block();
    more = walk.next();
    k_ready = false;
  }
};

template <typename C>
__device__ void compute(const FwdKernelParams& p, const FwdSmem<C>& smem, int group) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  float o[C::kDv / 2], s[C::kBlockN / 2];
  typename Worker<C>::Packed even, odd;
  BlockWalk<C> walk(smem, group, thread, p.pack);
  Worker<C> worker(p, smem, walk, group);
  // The output of a unit is staged over the warpgroup's rows of its Q. Those are free once the store has read them, which
  // is asked for in the next unit, when it costs nothing. With one Q slot it cannot wait that long.
  bool stored = false;
  uint32_t unit_count = 0;  // tells the slots of unit and Q
  auto release_stored = [&] {
    if (stored && thread == 0) {
      store_wait_read();
      mbar_arrive(smem.q_empty((unit_count - 1) % C::kQStages));
    }
    stored = false;
  };

  while (true) {
    mbar_wait(smem.unit_full(unit_count & 1), unit_count >> 1 & 1);
    int4 unit = lds_int4(smem.unit(unit_count & 1));
    unit = make_int4(uniform(unit.x), uniform(unit.y), uniform(unit.z), 0);
    if (lane == 0) mbar_arrive(smem.unit_empty(unit_count & 1));
    if (unit.x < 0) break;
    SoftmaxState<C> state;
    state.reset();
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) o[i] = 0.f;
    const uint32_t q_slot = unit_count % C::kQStages;
    const uint32_t q = operand_low(smem.q(q_slot) + group * 64 * 128, 16);
    worker.k_ready = false;
    walk.start(unit.z);
    worker.more = walk.next();
    if (C::kQStages == 1) release_stored();
    mbar_wait(smem.q_full(q_slot), unit_count / C::kQStages & 1);
    while (worker.more) {
      if (!walk.has_work()) {
        worker.skip_block();
        continue;
      }
      worker.first_block(s, o, even, state, q);
      if (C::kQStages > 1) release_stored();
      while (true) {
        if (!worker.more || !walk.has_work()) {
          worker.drain(o, even);
          break;
        }
        worker.next_block(s, o, even, odd, state, q);
        if (!worker.more || !walk.has_work()) {
          worker.drain(o, odd);
          break;
        }
        worker.next_block(s, o, odd, even, state, q);
      }
    }
    if (C::kQStages > 1) release_stored();
    write_tile<C>(p, smem.out(group, q_slot), o, state, unit.x, unit.y, group);
    ++unit_count;
    stored = true;
  }
  if (thread == 0) store_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) ffa_fwd(const __grid_constant__ FwdKernelParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  if (reinterpret_cast<const magi_tile_plan_header*>(p.plan)->status != 0) {
    write_nan<C>(p);
    return;
  }
  const FwdSmem<C> smem(smem_addr(raw), p.tile_tokens);
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.v_map);
    prefetch_tensor_map(&p.out_map);
  }
  __syncthreads();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles<C>(p, smem);
    if (threadIdx.x == 32) schedule_units<C>(p, smem);
    if (threadIdx.x / 32 == 2) clear_unseen<C>(p, smem, threadIdx.x % 32);
  } else {
    registers_grow<C::kConsumerRegisters>();
    compute<C>(p, smem, group - 1);
  }
}

}  // namespace magi
