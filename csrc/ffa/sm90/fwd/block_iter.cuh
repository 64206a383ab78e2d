// SPDX-License-Identifier: Apache-2.0
// How a consumer warpgroup iterates over the key blocks of a work tile.
#pragma once

#include "ffa/sm90/fwd/producer.cuh"
#include "ffa/common/softmax.cuh"

namespace magi {

// The key blocks of a work tile, in the order in which one consumer warpgroup takes them. Inside a
// segment, from the right: blocks without work for the warpgroup, masked ones, plain ones, masked
// ones, blocks without work. So the number of blocks left gives the kind of a block, by four
// thresholds that are computed once per segment. To save registers the row intervals stay in the
// record, which is released when the next segment is entered.
template <typename C>
struct NBlockIter {
  const FwdSmem<C>& smem;
  static constexpr uint32_t kOneSegment = 16;  // in `state`
  const bool capped;  // scores have a softcap: all blocks take the way of the masked ones
  uint32_t
      row_at;  // where the intervals of this thread's two rows are in a record: two 16-bit offsets
  uint32_t state = 0;  // work tiles so far in the low two bits, records so far in the next two:
                       // they tell stages and phases; above, segments that are left
  int k0 = 0;          // first key of this block
  int left = 0;        // blocks of the segment from this one on; 0 at the end of the work tile
  uint32_t work = 0,
           plain = 0;  // this warpgroup's: the kind holds for low half < left <= high half

  __device__ __forceinline__ NBlockIter(const FwdKernelParams& p, const FwdSmem<C>& s)
      : smem(s), capped(!C::kPlain && p.has_softcap) {
    const int row = (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4;
    row_at = (kSegmentHeader + 8 * (row / p.pack)) | (kSegmentHeader + 8 * ((row + 8) / p.pack))
                                                         << 16;
  }

  // The stage of the record at hand.
  __device__ __forceinline__ uint32_t segment_stage() const { return ~state >> 2 & 1; }

  __device__ __forceinline__ uint32_t work_stage() const { return state & 1; }
  __device__ __forceinline__ uint32_t work_phase() const { return state >> 1 & 1; }
  __device__ __forceinline__ void next_work() { state = (state & ~3u) | ((state + 1) & 3); }

  __device__ __forceinline__ bool has_work() const {
    return left > (work & 0xffff) && left <= (work >> 16);
  }
  __device__ __forceinline__ bool masked() const {
    return left <= (plain & 0xffff) || left > (plain >> 16);
  }

  // Moves to the next block of the segment; `left` is 0 if there is none.
  __device__ __forceinline__ void step() {
    k0 -= C::kBlockN;
    --left;
  }

  // At the end of a segment: on to the next one that has blocks, if the work tile has one.
  __device__ __forceinline__ void next_segment() {
    do {
      if (elect_one()) mbar_arrive(smem.segment_empty(segment_stage()));
      if (state < kOneSegment) return;
      enter_segment();
    } while (!C::kPlain && left == 0);
  }

  // The first block of a work tile.
  __device__ __forceinline__ void start(int num_segments) {
    state = (state & (kOneSegment - 1)) + num_segments * kOneSegment;
    if (num_segments == 0) return;
    enter_segment();
    if (!C::kPlain && left == 0) next_segment();
  }

  __device__ __forceinline__ void enter_segment() {
    mbar_wait(smem.segment_full(state >> 2 & 1), state >> 3 & 1);
    const uint32_t at = smem.segment(state >> 2 & 1);
    state = ((state & ~12u) | ((state + 4) & 12)) - kOneSegment;
    int2 visit = lds_int2(at);
    int4 mine = lds_int4(at + 32 +
                         16 * (thread_again() / 128 - 1));  // visit_lo, visit_hi, full_lo, full_hi
    if constexpr (!C::kPlain) {
      visit =
          Part::of_placed_word(lds_int(smem.work_tile(work_stage()) + 12)).template piece<C>(visit);
      mine = make_int4(max(mine.x, visit.x), min(mine.y, visit.y), max(mine.z, visit.x),
                       min(mine.w, visit.y));
    }
    const int end = visit.y, blocks = (end - visit.x + C::kBlockN - 1) / C::kBlockN;
    // Block with `left` to go covers [end - (blocks - left + 1) * N, end - (blocks - left) * N).
    const int below_hi =
        blocks - (end - mine.y) / C::kBlockN;  // left <= this: starts below visit_hi
    const int above_lo =
        blocks - (end - mine.x + C::kBlockN - 1) / C::kBlockN;  // left > this: ends above visit_lo
    const int under = blocks - (end - mine.w + C::kBlockN - 1) /
                                   C::kBlockN;  // left <= this: ends at most at full_hi
    const int over = blocks - (mine.z < end ? (end - mine.z) / C::kBlockN
                                            : 0);  // left > this: starts at or above full_lo
    const bool any = mine.y > mine.x, full = mine.w > mine.z;
    work = uniform(any ? above_lo | below_hi << 16 : 0);
    plain = uniform(full && under > over && !capped ? over | under << 16 : 0);
    left = uniform(blocks);
    k0 = uniform(end) - C::kBlockN;
  }

  __device__ __forceinline__ void mask(float (&s)[C::kBlockN / 2]) const {
    const uint32_t at = smem.segment(segment_stage());
    const int2 keys[2] = {lds_int2(at + (row_at & 0xffff)), lds_int2(at + (row_at >> 16))};
    mask_scores<C::kBlockN>(s, k0, keys, thread_again() % 32);
  }
};

}  // namespace magi
