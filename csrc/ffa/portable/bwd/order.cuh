// SPDX-License-Identifier: Apache-2.0
// The deterministic order in which tiles add to dq: by their numbers. A semaphore for each head and
// block of queries holds 1 + the last tile that has added. A tile waits until the nearest tile of
// lower number that contributes to the block has done so.
#pragma once

#include "device/atomics.cuh"
#include "ffa/portable/bwd/steps.cuh"

namespace magi::portable {

constexpr int kNoWait = -1, kNoBlock = -1;

// Which tile that is holds for a run of blocks [first, end), which lies in shared memory.
struct TileBefore {
  int tile, first, end;  // tile -1: none
};

// All of a warp: the run that `block` is in.
template <typename C>
__device__ __forceinline__ TileBefore find_tile_before(const PlanReader& plan, int of, int block,
                                                       int lane) {
  TileBefore run{-1, 0, INT_MAX};
  for (int nearest = of - 1; nearest >= 0; nearest -= 32) {
    const int candidate = nearest - lane;
    bool visits = false;
    int below = 0, above = INT_MAX;  // where the visits nearest to the block end and begin
    if (candidate >= 0) {
      const magi_tile_desc& desc = plan.tile(candidate);
      for (int i = 0; i < desc.num_segments && !visits; ++i) {
        const int2 blocks = blocks_of<C>(plan, desc.segment_begin + i);
        if (blocks.y <= blocks.x) continue;
        visits = block >= blocks.x && block < blocks.y;
        if (visits) {
          below = blocks.x;
          above = blocks.y;
        } else if (blocks.y <= block) {
          below = max(below, blocks.y);
        } else {
          above = min(above, blocks.x);
        }
      }
    }
    const uint32_t found = __ballot_sync(0xffffffff, visits);
    const int last = found != 0 ? __ffs(static_cast<int>(found)) - 1 : 31;
    run.first = max(run.first, __reduce_max_sync(0xffffffff, lane <= last ? below : 0));
    run.end = min(run.end, __reduce_min_sync(0xffffffff, lane <= last ? above : INT_MAX));
    if (found == 0) continue;
    run.tile = nearest - last;
    break;
  }
  return run;
}

// All of a warp, at the start of a step: leaves in shared memory what the semaphore of its block
// must be before this tile adds (or kNoWait: it has added before), and whether that is the tile's
// last contribution to the block.
template <typename C>
__device__ __forceinline__ void find_order(const BwdKernelParams& p, uint32_t smem,
                                           uint32_t segment, int block, int lane) {
  const PlanReader plan{p.plan};
  const TileHeads tile = TileHeads::load<C>(smem);
  bool first = true, last = true;  // of this tile's contributions to the block
  if (tile.end - tile.begin > 1) {
    const int number = number_of(segment);
    for (int i = tile.begin + lane; i < tile.end; i += 32) {
      const int2 blocks = blocks_of<C>(plan, i);
      const bool visits = block >= blocks.x && block < blocks.y;
      if (visits && i < number) first = false;
      if (visits && i > number) last = false;
    }
    first = __all_sync(0xffffffff, first);
    last = __all_sync(0xffffffff, last);
  }
  const int4 known = lds_int4(smem + C::kOrderAt);
  TileBefore run{known.y, known.z, known.w};
  if (first && (block < run.first || block >= run.end))
    run = find_tile_before<C>(plan, tile.tile, block, lane);
  __syncwarp();
  if (lane != 0) return;
  sts_int4(smem + C::kOrderAt, first ? run.tile + 1 : kNoWait, run.tile, run.first, run.end);
  sts_int(smem + C::kOrderAt + 16, last);
}

// One thread: until the tiles before have added theirs.
template <typename C>
__device__ __forceinline__ void wait_for_order(const BwdKernelParams& p, uint32_t smem,
                                               int64_t semaphore) {
  const int after = lds_int(smem + C::kOrderAt);
  if (after == kNoWait) return;
  while (load_acquire(p.semaphore + semaphore) != after) __nanosleep(20);
}

// One thread, behind a barrier: this tile's contributions to a block are there.
__device__ __forceinline__ void release_block(const BwdKernelParams& p, int semaphore, int tile) {
  if (semaphore == kNoBlock) return;
  __threadfence();
  store_release(p.semaphore + semaphore, tile + 1);
}

}  // namespace magi::portable
