// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward read out of a plan: whether it is theirs, and which blocks of
// queries a tile of keys visits in which order.
#pragma once

#include <cstddef>

#include "magi/abi.h"
#include "device/registers.cuh"
#include "device/shared.cuh"
#include "ffa/sm90/bwd/config.h"

namespace magi {

// Whether the plan is complete and made for these sizes.
__device__ __forceinline__ bool bwd_plan_fits(const int32_t* plan, int total_q, int total_k) {
  const magi_tile_plan_header& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  return header.status == 0 && header.total_q == total_k && header.total_k == total_q &&
         header.tile_tokens == kTileBlockN && header.num_groups == 2;
}

// Whether it tells in which order work tiles are taken up and how they are walked.
__device__ __forceinline__ bool has_work_tiles(const int32_t* plan) {
  return reinterpret_cast<const magi_tile_plan_header*>(plan)->words_work_tiles != 0;
}

// First segment record of a tile and how many it has.
__device__ __forceinline__ int2 segments_of_tile(const int32_t* plan, int tile) {
  const int tiles_at = reinterpret_cast<const magi_tile_plan_header*>(plan)->words_tiles;
  return *reinterpret_cast<const int2*>(plan + tiles_at + 8 * tile +
                                        offsetof(magi_tile_desc, segment_begin) / 4);
}

__device__ __forceinline__ const int32_t* segment_record(const int32_t* plan, int index) {
  const magi_tile_plan_header& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  return plan + header.words_records + static_cast<int64_t>(index) * header.segment_words;
}

// The block of a query. Without a division, which takes more registers than the feeding lanes have.
template <int kBlockM>
__device__ __forceinline__ int block_of(uint32_t query) {
  static_assert(kBlockM == kBlockM80 || kBlockM % kBlockM64 == 0, "a factor for each");
  if constexpr (kBlockM != kBlockM80) return query / kBlockM;
  return high_of_product<0xcccccccd>(query) / 64;  // 2^38 / 80, rounded up
}

// Blocks of queries on a grid that all tiles share, because their dq is summed: first, and behind
// the last.
template <int kBlockM>
__device__ __forceinline__ int2 blocks_of(int2 visit) {
  return make_int2(block_of<kBlockM>(visit.x), block_of<kBlockM>(visit.y + kBlockM - 1));
}

template <int kBlockM>
__device__ __forceinline__ int2 segment_blocks(const int32_t* plan, int segment) {
  return blocks_of<kBlockM>(*reinterpret_cast<const int2*>(segment_record(plan, segment)));
}

// Whether the keys of a tile see a band of queries, both of whose ends move with the key, as under
// a sliding window; `range` is visit_lo, visit_hi, full_lo, full_hi of the first warpgroup. Tiles
// then see different blocks at the same time, and what they share stays in L2 only as long as it is
// that of one head: such a segment is walked once for each head, others once, each block for all
// heads.
__device__ __forceinline__ bool is_band(int4 range) {
  return range.z > range.x && range.w < range.y;
}

// The way in which a work tile takes the blocks of a segment. What CTAs do at the same time should
// be the same blocks, which are then in L2. Under a causal mask tile i of n sees the blocks from i
// on. Let a CTA that starts early take as many from the end, backwards, as it has none at the
// start, then the rest forwards; and one that starts when a long tile is done, so with a short one,
// all forwards. Then at time t every CTA is at block t or at block n - t.
enum class Traversal { kAscending, kWrap, kDescending };

__device__ __forceinline__ int blocks_backwards(int2 blocks, Traversal traversal) {
  const int count = blocks.y - blocks.x;
  return traversal == Traversal::kAscending    ? 0
         : traversal == Traversal::kDescending ? count
                                               : min(blocks.x, count);
}

// The same, by num_descending of a magi_work_tile.
__device__ __forceinline__ int blocks_backwards(int2 blocks, int num_descending) {
  return min(num_descending == MAGI_TRAVERSAL_WRAP ? blocks.x : num_descending,
             blocks.y - blocks.x);
}

// How dq is summed in order, see bwd/schedule/semaphore_targets.cuh: flags of a plan. All heads of
// a segment one after the other, or all heads of a block; whether expected times count, among all
// tiles or in waves, or else tiles alone; whether all work tiles walk backwards; whether L2 groups
// of heads behind the first have semaphore targets of their own; and whether those that begin
// together begin some blocks apart.
enum : int32_t {
  kByHead = 1,
  kTimed = 2,
  kInWaves = 4,
  kAllDescending = 8,
  kLaterTargets = 16,
  kApart = 32
};

__device__ __forceinline__ Traversal ordered_traversal(int flags, bool late) {
  // Tiles of a document end at the same block, and so do others often, and the longest comes first.
  if (flags & kAllDescending || !(flags & (kTimed | kInWaves))) return Traversal::kDescending;
  return late || flags & kByHead ? Traversal::kAscending : Traversal::kWrap;
}

// Staggered start: how many blocks before the end of each segment the work tile of an order index
// begins; the blocks behind come last. A work tile as long as the one that it follows on its CTA
// has the same shift. `order`: flags of the plan, then the costs of the tiles.
constexpr int kBlocksApart = 3;
__device__ __forceinline__ int ordered_shift(const int32_t* order, int order_idx, int wave) {
  if (!(order[0] & kApart) ||
      (order_idx >= wave && order[1 + order_idx] != order[1 + order_idx - wave]))
    return 0;
  return kBlocksApart * (order_idx % wave);
}

// When a work tile comes to a block of a segment that it walks so, in blocks from the first.
__device__ __forceinline__ int place_in_traversal(int2 blocks, Traversal traversal, int shift,
                                                  int block) {
  const int count = blocks.y - blocks.x, backwards = blocks_backwards(blocks, traversal),
            from_end = blocks.y - 1 - block;
  if (traversal == Traversal::kDescending)
    return from_end - shift % count + (from_end < shift % count ? count : 0);
  return from_end < backwards ? from_end : backwards + block - blocks.x;
}

// Blocks in that way.
struct MBlockIter {
  int block;
  uint32_t count;  // blocks left, this one included | how many of them are taken backwards, each in
                   // half a register

  template <typename From>  // a Traversal, or num_descending
  __device__ __forceinline__ MBlockIter(int2 blocks, From traversal) {
    const int backwards = blocks_backwards(blocks, traversal);
    count = blocks.y - blocks.x | backwards << 16;
    block = backwards > 0 ? blocks.y - 1 : blocks.x;
  }
  // Backwards, from so many blocks before the end on, and round.
  __device__ __forceinline__ MBlockIter(int2 blocks, Traversal traversal, int shift)
      : MBlockIter(blocks, traversal) {
    if (shift == 0) return;
    shift %= blocks.y - blocks.x;
    block -= shift;
    count -= shift << 16;
  }
  __device__ __forceinline__ int left() const { return count & 0xffff; }
  // `blocks()` are those of the constructor, looked up again rather than kept.
  template <typename Blocks>
  __device__ __forceinline__ void step(Blocks blocks) {
    --count;
    if (count >> 16 == 0) {
      ++block;
      return;
    }
    count -= 1 << 16;
    block = count >> 16 ? block - 1 : blocks().x;
  }
  // The same of a walk that may begin before the end: what is left after its first part is walked
  // backwards, too, if it `goes_round()`.
  template <typename Blocks, typename Round>
  __device__ __forceinline__ void step(Blocks blocks, Round goes_round) {
    step(blocks);
    if (count == 0 || count >> 16 != 0 || !goes_round()) return;
    block = blocks().y - 1;
    count |= count << 16;
  }
};

}  // namespace magi
