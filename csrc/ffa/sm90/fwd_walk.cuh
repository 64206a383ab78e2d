// SPDX-License-Identifier: Apache-2.0
// The way of a consumer warpgroup through the key blocks of a unit.
#pragma once

#include "fwd_feed.cuh"
#include "fwd_softmax.cuh"

namespace magi {

// The sequence of key blocks of a unit, as one consumer warpgroup walks it. Inside a layer, from the right: blocks without
// work for the warpgroup, masked ones, plain ones, masked ones, blocks without work. So a block's kind is told by how many
// are left, against four thresholds that are worked out once per layer. Few registers: the row intervals stay in the
// record, which is released when the next layer is entered.
template <typename C>
struct BlockWalk {
  const FwdSmem<C>& smem;
  const bool capped;     // scores have a softcap: all blocks take the way of the masked ones
  uint32_t row_at;       // where the intervals of this thread's two rows are in a record: two 16-bit offsets
  uint32_t turns = 0;    // units so far in the low two bits, records so far above: they tell slots and phases
  int layers_left = 0;
  int k0 = 0;            // first key of this block
  int left = 0;          // blocks of the layer from this one on; 0 at the end of the unit
  uint32_t work = 0, plain = 0;  // this warpgroup's: the kind holds for low half < left <= high half

  __device__ __forceinline__ BlockWalk(const FwdSmem<C>& s, int pack, bool softcap) : smem(s), capped(softcap) {
    const int row = (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4;
    row_at = (C::kLayerHeader + 8 * (row / pack)) | (C::kLayerHeader + 8 * ((row + 8) / pack)) << 16;
  }

  // Of the record at hand.
  __device__ __forceinline__ uint32_t layer_slot() const { return ~turns >> 2 & 1; }

  __device__ __forceinline__ uint32_t unit_slot() const { return turns & 1; }
  __device__ __forceinline__ uint32_t unit_phase() const { return turns >> 1 & 1; }
  __device__ __forceinline__ void next_unit() { turns = (turns & ~3u) | ((turns + 1) & 3); }

  __device__ __forceinline__ bool has_work() const { return left > (work & 0xffff) && left <= (work >> 16); }
  __device__ __forceinline__ bool masked() const { return left <= (plain & 0xffff) || left > (plain >> 16); }

  // Moves to the next block of the layer; `left` is 0 if there is none.
  __device__ __forceinline__ void step() {
    k0 -= C::kBlockN;
    --left;
  }

  // At the end of a layer: on to the next one that has blocks, if the unit has one.
  __device__ __forceinline__ void next_layer() {
    do {
      if (elect_one()) mbar_arrive(smem.layer_empty(layer_slot()));
      if (layers_left == 0) return;
      enter_layer();
    } while (!C::kPlain && left == 0);
  }

  // The first block of a unit.
  __device__ __forceinline__ void start(int num_layers) {
    layers_left = num_layers;
    if (num_layers == 0) return;
    enter_layer();
    if (!C::kPlain && left == 0) next_layer();
  }

  __device__ __forceinline__ void enter_layer() {
    mbar_wait(smem.layer_full(turns >> 2 & 1), turns >> 3 & 1);
    const uint32_t at = smem.layer(turns >> 2 & 1);
    turns += 4;
    --layers_left;
    int2 visit = lds_int2(at);
    int4 mine = lds_int4(at + 32 + 16 * (thread_again() / 128 - 1));  // visit_lo, visit_hi, full_lo, full_hi
    if constexpr (!C::kPlain) {
      visit = Part::of_word(lds_int(smem.unit(unit_slot()) + 12)).template piece<C>(visit);
      mine = make_int4(max(mine.x, visit.x), min(mine.y, visit.y), max(mine.z, visit.x), min(mine.w, visit.y));
    }
    const int end = visit.y, blocks = (end - visit.x + C::kBlockN - 1) / C::kBlockN;
    // Block with `left` to go covers [end - (blocks - left + 1) * N, end - (blocks - left) * N).
    const int below_hi = blocks - (end - mine.y) / C::kBlockN;              // left <= this: starts below visit_hi
    const int above_lo = blocks - (end - mine.x + C::kBlockN - 1) / C::kBlockN;  // left > this: ends above visit_lo
    const int under = blocks - (end - mine.w + C::kBlockN - 1) / C::kBlockN;     // left <= this: ends at most at full_hi
    const int over = blocks - (mine.z < end ? (end - mine.z) / C::kBlockN : 0);  // left > this: starts at or above full_lo
    const bool any = mine.y > mine.x, full = mine.w > mine.z;
    work = uniform(any ? above_lo | below_hi << 16 : 0);
    plain = uniform(full && under > over && !capped ? over | under << 16 : 0);
    left = uniform(blocks);
    k0 = uniform(end) - C::kBlockN;
  }

  __device__ __forceinline__ void mask(float (&s)[C::kBlockN / 2]) const {
    const uint32_t at = smem.layer(layer_slot());
    const int2 keys[2] = {lds_int2(at + (row_at & 0xffff)), lds_int2(at + (row_at >> 16))};
    mask_scores<C::kBlockN>(s, k0, keys, thread_again() % 32);
  }
};

}  // namespace magi
