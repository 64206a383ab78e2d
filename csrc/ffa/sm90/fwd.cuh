// SPDX-License-Identifier: Apache-2.0
// FFA forward for sm_90a. One CTA owns a query tile and walks all key intervals of its layers, accumulating in
// registers; the output is written once. Warpgroup 0 feeds (one scheduling lane, one copying lane), the others compute.
#pragma once

#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/copy.cuh"
#include "../common/wgmma.cuh"
#include "fwd_config.h"
#include "fwd_epilogue.cuh"
#include "fwd_params.h"
#include "fwd_softmax.cuh"

namespace magi {

// One (tile, head unit) as the scheduler hands it out.
struct Unit {
  int32_t tile;        // -1: no more work
  int32_t head_unit;
  int32_t num_layers;
  int32_t reserved;
};

template <typename C>
struct FwdSmem {
  uint32_t base;        // shared-space address of the 1024-aligned start
  uint32_t bars;        // first barrier
  uint32_t layer_bytes;

  __device__ FwdSmem(uint32_t start, int tile_tokens) : base(start) {
    layer_bytes = C::layer_bytes(tile_tokens);
    bars = base + C::kLayersAt + C::kLayerSlots * layer_bytes;
  }
  __device__ uint32_t q(uint32_t slot) const { return base + C::kQAt + slot * C::kQBytes; }
  __device__ uint32_t k(uint32_t slot) const { return base + C::kKAt + slot * C::kKBytes; }
  __device__ uint32_t v(uint32_t slot) const { return base + C::kVAt + slot * C::kVBytes; }
  __device__ uint32_t out(int group, uint32_t q_slot) const {
    return q(q_slot) + group * (64 * 128);  // its own rows of Q, in every column tile
  }
  __device__ uint32_t layer(uint32_t slot) const { return base + C::kLayersAt + slot * layer_bytes; }
  __device__ uint32_t bar(int i) const { return bars + 8 * i; }
  __device__ uint32_t q_full(uint32_t s) const { return bar(0 + s); }
  __device__ uint32_t q_empty(uint32_t s) const { return bar(2 + s); }
  __device__ uint32_t k_full(uint32_t s) const { return bar(4 + s); }
  __device__ uint32_t k_empty(uint32_t s) const { return bar(6 + s); }
  __device__ uint32_t unit_full(uint32_t s) const { return bar(8 + s); }
  __device__ uint32_t unit_empty(uint32_t s) const { return bar(10 + s); }
  __device__ uint32_t layer_full(uint32_t s) const { return bar(12 + s); }
  __device__ uint32_t layer_empty(uint32_t s) const { return bar(14 + s); }
  __device__ uint32_t v_full(uint32_t s) const { return bar(16 + s); }
  __device__ uint32_t v_empty(uint32_t s) const { return bar(19 + s); }
  __device__ uint32_t v_raw(uint32_t s) const { return bar(22 + s); }  // arrived, but with rows to be cleared
  __device__ uint32_t unit(uint32_t s) const { return bar(26) + 16 * s; }

  __device__ void init_barriers() const {
    for (uint32_t s = 0; s < 2; ++s) {
      mbar_init(q_full(s), 1);
      mbar_init(q_empty(s), C::kGroups);
      mbar_init(k_full(s), 1);
      mbar_init(k_empty(s), C::kConsumerWarps);
      mbar_init(unit_full(s), 1);
      mbar_init(unit_empty(s), C::kConsumerWarps + 2);
      mbar_init(layer_full(s), 1);
      mbar_init(layer_empty(s), C::kConsumerWarps + 2);
    }
    for (uint32_t s = 0; s < C::kVStages; ++s) {
      mbar_init(v_full(s), 1);
      mbar_init(v_raw(s), 1);
      mbar_init(v_empty(s), C::kConsumerWarps);
    }
    mbar_init_fence();
  }
};

__device__ __forceinline__ int4 lds_int4(uint32_t address) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ int lds_int(uint32_t address) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ int2 lds_int2(uint32_t address) {
  int2 v;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// The same value in every lane, in a way that the compiler can see: control flow and descriptors that depend on it then
// live in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// Linear unit index -> (rank in the cost order, head unit). Inside a section of heads the heaviest tiles of all its
// heads come first; sections follow one another so that their keys and values stay in L2.
__device__ __forceinline__ void unit_coords(const FwdKernelParams& p, int unit, int* rank, int* head_unit) {
  const int per_section = p.num_tiles * p.heads_per_section;
  const int section = unit / per_section;
  const int in_section = unit - section * per_section;
  const int first = section * p.heads_per_section;
  const int heads = min(p.heads_per_section, p.head_units - first);
  *rank = in_section / heads;
  *head_unit = first + in_section - *rank * heads;
}

// One lane. Hands out units two ahead and stages the layer records of each in shared memory.
template <typename C>
__device__ void schedule_units(const FwdKernelParams& p, const FwdSmem<C>& smem) {
  const magi_tile_plan_header* header = reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  const int4* tiles = reinterpret_cast<const int4*>(p.plan + header->words_tiles);
  const int32_t* order = p.plan + header->words_order;
  const int32_t* records = p.plan + header->words_records;
  const int layer_words = header->layer_words;
  const int total = p.num_tiles * p.head_units;
  Ring<2> units, layers;
  int unit = blockIdx.x;
  int next = unit < total ? atomicAdd(p.workspace, 1) + gridDim.x : total;
  int rank = 0, head_unit = 0, tile = 0;
  int4 desc = make_int4(0, 0, 0, 0);
  if (unit < total) {
    unit_coords(p, unit, &rank, &head_unit);
    tile = order[rank];
    desc = tiles[2 * tile];
  }
  while (unit < total) {
    // The look-ups of the next unit travel while this one is handed out.
    const int after = next < total ? atomicAdd(p.workspace, 1) + gridDim.x : total;
    int next_rank = 0, next_head = 0, next_tile = 0;
    if (next < total) {
      unit_coords(p, next, &next_rank, &next_head);
      next_tile = order[next_rank];
    }
    mbar_wait(smem.unit_empty(units.slot), units.phase ^ 1);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(smem.unit(units.slot)), "r"(tile), "r"(head_unit),
                 "r"(desc.w), "r"(0)
                 : "memory");
    mbar_arrive(smem.unit_full(units.slot));
    units.advance();
    for (int i = 0; i < desc.w; ++i) {
      mbar_wait(smem.layer_empty(layers.slot), layers.phase ^ 1);
      mbar_expect(smem.layer_full(layers.slot), layer_words * 4);
      load_bytes(smem.layer(layers.slot), records + static_cast<int64_t>(desc.z + i) * layer_words, layer_words * 4,
                 smem.layer_full(layers.slot));
      layers.advance();
    }
    unit = next;
    next = after;
    tile = next_tile;
    head_unit = next_head;
    if (unit < total) desc = tiles[2 * tile];
  }
  mbar_wait(smem.unit_empty(units.slot), units.phase ^ 1);
  asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(smem.unit(units.slot)), "r"(-1) : "memory");
  mbar_arrive(smem.unit_full(units.slot));
  // The last CTA to get here resets the counter for the next launch on this stream.
  __threadfence();
  if (atomicInc(reinterpret_cast<unsigned*>(p.workspace) + 1, gridDim.x - 1) == gridDim.x - 1) p.workspace[0] = 0;
}

// One lane. Copies Q, K and V tiles.
template <typename C>
__device__ void copy_tiles(const FwdKernelParams& p, const FwdSmem<C>& smem) {
  Ring<2> units, layers;
  Ring<C::kQStages> qs;
  Ring<C::kKStages> ks;
  Ring<C::kVStages> vs;
  while (true) {
    mbar_wait(smem.unit_full(units.slot), units.phase);
    const int4 unit = lds_int4(smem.unit(units.slot));
    mbar_arrive(smem.unit_empty(units.slot));
    units.advance();
    if (unit.x < 0) break;
    const int num_layers = unit.z;
    const int kv_head = unit.y / p.kv_head_of_unit;
    mbar_wait(smem.q_empty(qs.slot), qs.phase ^ 1);
    if (num_layers == 0) {  // nothing to load, but the output is staged in this slot
      mbar_arrive(smem.q_full(qs.slot));
      qs.advance();
      continue;
    }
    mbar_expect(smem.q_full(qs.slot), C::kQBytes);
#pragma unroll
    for (int d = 0; d < C::kD / 64; ++d)
      load_tile_4d(smem.q(qs.slot) + d * C::kBlockM * 128, &p.q_map, smem.q_full(qs.slot), d * 64, 0,
                   unit.x * p.tile_tokens, unit.y, kEvictFirst);
    qs.advance();
    for (int i = 0; i < num_layers; ++i) {
      mbar_wait(smem.layer_full(layers.slot), layers.phase);
      const int2 visit = lds_int2(smem.layer(layers.slot));
      const bool clears = lds_int(smem.layer(layers.slot) + 16) != 0;
      mbar_arrive(smem.layer_empty(layers.slot));
      layers.advance();
      // Blocks are laid from the right end: a causal diagonal then lies in the first one.
      for (int k1 = visit.y; k1 > visit.x; k1 -= C::kBlockN) {
        const int k0 = k1 - C::kBlockN;  // may be negative: rows outside the tensor arrive as zeros
        mbar_wait(smem.k_empty(ks.slot), ks.phase ^ 1);
        mbar_expect(smem.k_full(ks.slot), C::kKBytes);
#pragma unroll
        for (int d = 0; d < C::kD / 64; ++d)
          load_tile_3d(smem.k(ks.slot) + d * C::kBlockN * 128, &p.k_map, smem.k_full(ks.slot), d * 64, k0, kv_head,
                       kEvictLast);
        ks.advance();
        mbar_wait(smem.v_empty(vs.slot), vs.phase ^ 1);
        const uint32_t arrival = clears ? smem.v_raw(vs.slot) : smem.v_full(vs.slot);
        mbar_expect(arrival, C::kVBytes);
#pragma unroll
        for (int d = 0; d < C::kDv / 64; ++d)
          load_tile_3d(smem.v(vs.slot) + d * C::kBlockN * 128, &p.v_map, arrival, d * 64, k0, kv_head, kEvictLast);
        vs.advance();
      }
    }
  }
}

// One warp. Where a layer may touch keys that no query sees, zeroes the V rows that no token of the tile sees: their weight
// is zero, but zero times the NaN or Inf that such rows may hold is not.
template <typename C>
__device__ void clear_unseen(const FwdKernelParams& p, const FwdSmem<C>& smem, int lane) {
  Ring<2> units, layers;
  Ring<C::kVStages> vs;
  uint32_t raw_phases = 0;  // v_raw moves only where it is used, so each slot keeps its own phase
  while (true) {
    mbar_wait(smem.unit_full(units.slot), units.phase);
    const int4 unit = lds_int4(smem.unit(units.slot));
    __syncwarp();
    if (lane == 0) mbar_arrive(smem.unit_empty(units.slot));
    units.advance();
    if (unit.x < 0) break;
    for (int i = 0; i < unit.z; ++i) {
      mbar_wait(smem.layer_full(layers.slot), layers.phase);
      const uint32_t at = smem.layer(layers.slot);
      const int2 visit = lds_int2(at);
      const bool clears = lds_int(at + 16) != 0;
      for (int k1 = visit.y; k1 > visit.x; k1 -= C::kBlockN) {
        if (clears) {
          mbar_wait(smem.v_raw(vs.slot), raw_phases >> vs.slot & 1);
          raw_phases ^= 1u << vs.slot;
          for (int row = lane; row < C::kBlockN; row += 32) {
            const int key = k1 - C::kBlockN + row;
            bool seen = false;
            for (int t = 0; t < p.tile_tokens && !seen; ++t) {
              const int2 keys = lds_int2(at + C::kLayerHeader + 8 * t);
              seen = key >= keys.x && key < keys.y;
            }
            for (int chunk = 0; chunk < C::kDv / 8 && !seen; ++chunk)
              asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(
                               smem.v(vs.slot) + chunk / 8 * (C::kBlockN * 128) + row * 128 + chunk % 8 * 16),
                           "r"(0)
                           : "memory");
          }
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) mbar_arrive(smem.v_full(vs.slot));
        }
        vs.advance();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem.layer_empty(layers.slot));
      layers.advance();
    }
  }
}

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
  Ring<2> layers;    // of the next record
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
    if (left == 0 && lane == 0) mbar_arrive(smem.layer_empty(layers.slot ^ 1));
    if (layers_left == 0) return false;
    enter_layer();
    return true;
  }

  __device__ __forceinline__ void enter_layer() {
    mbar_wait(smem.layer_full(layers.slot), layers.phase);
    at = smem.layer(layers.slot);
    layers.advance();
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
  uint32_t blocks = 0;   // so far; tells the stage of K
  Ring<C::kVStages> vs;  // of the next block; the one before is packed, the one before that may be under way
  bool flying = false, more = false;
  bool k_ready = false, v_ready = false;  // what the next block needs has been seen to have arrived

  __device__ __forceinline__ Worker(const FwdKernelParams& params, const FwdSmem<C>& s, BlockWalk<C>& w)
      : p(params), smem(s), walk(w) {}

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
    const bool rescale = state.update(s, p.scale_log2, p.slack);
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
  Worker<C> worker(p, smem, walk);
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
