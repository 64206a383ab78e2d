// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of keys add to dq, where that is asked for: then dq is the same bits on every run.
//
// Each block of queries counts what has been added to it. A tile waits until those have added that come before it: that number is
// its turn. The order is fixed beforehand, by the time at which a tile should get to the block, so that waits are short: the start
// of its unit, by a simulation of how units are handed out, and the block's place in its walk.
//
// Nobody waits in a circle. Expected times grow along every walk, so of all that has not happened yet what is expected first has
// nothing to wait for but a CTA. It gets one: units are taken up in the order of the simulation, and what ended there before it
// starts has ended here. The simulation has no more units at a time than there are CTAs.
//
// Where units walk head by head, a block is expected at another time for each head, but turns are to be the same for all: there, and
// where tiles are too many to compare, ranks are cut into waves of no more units than there are CTAs. The order is that of the
// waves, and within one that of the expected time without the heads. Whoever waits for an earlier wave waits for units that were
// taken up before and will end; all units of a wave get a CTA, as the CTAs that have none of it are at earlier ones.
//
// Where a tile visits a block in more than one layer there is no such time either: then the order is that of the ranks.
#pragma once

#include "../common/copy.cuh"
#include "bwd_params.h"
#include "bwd_plan.cuh"

namespace magi {

// Turns order additions, which all happen in L2, and no other data; a copy has been added there when it is complete. So they
// need neither acquire nor release, which would cost a tenth of the time.
__device__ __forceinline__ int load_relaxed(const int32_t* address) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void add_relaxed(int32_t* address, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_bulk_float(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void sts_float4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ int2 layer_blocks(const int32_t* plan, int layer) {
  return blocks_of(*reinterpret_cast<const int2*>(layer_record(plan, layer)));
}

// One CTA of kThreads: the flags of the plan, and when the tile of each rank is expected to start, in blocks of one head.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_expect(const BwdRowParams p) {
  __shared__ int bands, visits_twice;
  start_next_kernel();
  if (!bwd_plan_fits(p.plan, p.total_q, p.total_k)) return;
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  int32_t* starts = p.order + 1;
  if (threadIdx.x == 0) bands = visits_twice = 0;
  __syncthreads();
  for (int rank = threadIdx.x; rank < p.num_tiles; rank += kThreads) {
    const int2 layers = layers_of_tile(p.plan, order[rank]);
    int cost = 0, votes = 0;
    bool twice = layers.y > 8;  // or it would take long to tell
    for (int i = 0; i < layers.y; ++i) {
      const int2 blocks = layer_blocks(p.plan, layers.x + i);
      cost += blocks.y - blocks.x;
      votes += is_band(*reinterpret_cast<const int4*>(layer_record(p.plan, layers.x + i) + 8)) ? 1 : -1;
      for (int j = 0; j < i && !twice; ++j) {
        const int2 other = layer_blocks(p.plan, layers.x + j);
        twice = blocks.x < other.y && other.x < blocks.y;
      }
    }
    starts[rank] = cost;
    atomicAdd(&bands, votes);
    if (twice) visits_twice = 1;
  }
  __syncthreads();
  const bool by_head = bands > 0;
  const bool timed = !by_head && p.num_tiles <= kMaxTimed;
  if (threadIdx.x == 0) p.order[0] = (by_head ? kByHead : 0) | (visits_twice ? 0 : timed ? kTimed : kInWaves);
  if (threadIdx.x >= 32) return;
  // Lane l keeps the ends of what places l, l + 32, ... are at; the next unit goes where one ends first.
  constexpr int kPlaces = kMaxWave / 32;
  unsigned ends[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) ends[i] = static_cast<int>(threadIdx.x) + 32 * i < p.wave ? 0 : ~0u;
  for (int rank = 0; rank < p.num_tiles; ++rank) {
    unsigned mine = ~0u;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) mine = min(mine, ends[i]);
    const unsigned first = __reduce_min_sync(0xffffffff, mine);
    const unsigned cost = starts[rank];
    __syncwarp();
    if (threadIdx.x == 0) starts[rank] = first * (by_head ? p.heads_per_part : 1);
    if (static_cast<int>(threadIdx.x) != __ffs(__ballot_sync(0xffffffff, mine == first)) - 1) continue;
    bool taken = false;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (taken || ends[i] != first) continue;
      ends[i] = first + cost;
      taken = true;
    }
  }
}

// When a tile is expected at a block, from bit 16 on, and how often it visits it.
__device__ __forceinline__ uint64_t visits_of(const BwdRowParams& p, int tile, int rank, int block) {
  const int2 layers = layers_of_tile(p.plan, tile);
  const int flags = p.order[0];
  const bool by_rank = !(flags & (kTimed | kInWaves));
  uint64_t time = by_rank ? 0 : p.order[1 + rank];
  uint32_t count = 0;
  for (int i = 0; i < layers.y; ++i) {
    const int2 blocks = layer_blocks(p.plan, layers.x + i);
    if (block < blocks.x || block >= blocks.y) {
      time += by_rank ? 0 : flags & kByHead ? 1ull << 36 : blocks.y - blocks.x;
      continue;
    }
    ++count;
    if (by_rank) continue;
    const int backwards = blocks_backwards(blocks, ordered_way(flags, rank >= p.wave));
    time += block >= blocks.y - backwards ? blocks.y - 1 - block : backwards + block - blocks.x;
    break;
  }
  return time << 16 | min(count, 0xffffu);
}

// A whole CTA: the turns of all tiles at one block of queries.
template <int kThreads>
__device__ void assign_turns(const BwdRowParams& p, int block) {
  __shared__ uint64_t visits[kMaxTimed];
  static_assert(kMaxWave <= kMaxTimed && kThreads <= kMaxTimed, "those that are compared");
  const int* order = p.plan + reinterpret_cast<const magi_tile_plan_header*>(p.plan)->words_order;
  const int together = p.order[0] & kTimed ? p.num_tiles : p.order[0] & kInWaves ? p.wave : kThreads;
  for (int first = 0, before = 0; first < p.num_tiles; first += together) {
    const int here = min(together, p.num_tiles - first);
    for (int i = threadIdx.x; i < here; i += kThreads) visits[i] = visits_of(p, order[first + i], first + i, block);
    __syncthreads();
    for (int i = threadIdx.x; i < here; i += kThreads) {
      const uint64_t mine = visits[i];
      if ((mine & 0xffff) == 0) continue;
      int turn = before;
      for (int j = 0; j < here; ++j)
        if (visits[j] >> 16 < mine >> 16 || (visits[j] >> 16 == mine >> 16 && j < i)) turn += visits[j] & 0xffff;
      p.turns[static_cast<int64_t>(block) * p.num_tiles + order[first + i]] = turn;
    }
    for (int i = 0; i < here; ++i) before += visits[i] & 0xffff;
    __syncthreads();
  }
}

// The sum of the two warpgroups' shares of a step's dq, when its turn has come. One lane, beside the next step. `words`: which part
// of dq_sum, in blocks of all columns of a pass, and the turn; `next_words` those of the next step, or 0; `seen` what its counter
// was when last looked at, or -1.
template <typename C>
__device__ __forceinline__ void add_in_turn(const BwdKernelParams& p, uint32_t staged, uint32_t staged_is_free, uint32_t words,
                                            uint32_t next_words, int& seen) {
  int32_t* turns = p.turn_flags;
  while (seen < lds_int(words + 4)) seen = load_relaxed(turns + static_cast<uint32_t>(lds_int(words)));
  add_bulk_float(p.dq_sum + static_cast<uint32_t>(lds_int(words)) * static_cast<uint64_t>(C::kOut / 64 * kDqBlockFloats), staged,
                 C::kGroups * C::kDqBytes);
  store_commit();
  seen = next_words != 0 ? load_relaxed(turns + static_cast<uint32_t>(lds_int(next_words))) : -1;
  store_wait_read();
  mbar_arrive(staged_is_free);
  store_wait_all();
  add_relaxed(turns + static_cast<uint32_t>(lds_int(words)), 1);
}

}  // namespace magi
