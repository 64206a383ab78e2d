// SPDX-License-Identifier: Apache-2.0
// The kernel before the main one where units are listed (bwd_list.cuh). It is bound by device memory, which the main kernel hardly
// uses. So all multiprocessors prepare only the blocks of queries that are needed at once, if the list says which those are; then a few
// go on with the others, in the order in which they are needed, and the main kernel begins beside them and waits for each block. To
// keep the memory busy from a few, out and dout come by bulk copies, one block ahead, and the sum of dq is cleared by bulk stores.
#pragma once

#include "../common/copy.cuh"
#include "../common/flags.cuh"
#include "bwd_complete.cuh"
#include "bwd_prepare.cuh"

namespace magi {

constexpr int kPrepareGroups = 3;  // of a CTA, of which there is one on a multiprocessor; each takes a block of a head at a time
constexpr int kPrepareWarps = 8;   // of a group that compute; two more copy and clear
constexpr int kPrepareThreads = kPrepareGroups * (kPrepareWarps + 2) * 32;
constexpr int kPrepareStages = 2;
constexpr int kPrepareBatch = 2;  // blocks that a group says are prepared at a time
// Shared memory: zeros; for each group and stage out and dout, 64 columns and then the others; two barriers; counts.
constexpr uint32_t kPrepareHalf = kQueryBlock * 64 * 2;  // bytes of 64 columns
constexpr uint32_t kPrepareZeros = dq_block_floats(kQueryBlock) * 4;
constexpr uint32_t kPrepareBarriersAt = kPrepareZeros + kPrepareGroups * kPrepareStages * 4 * kPrepareHalf;
constexpr uint32_t kPrepareCountsAt = kPrepareBarriersAt + kPrepareGroups * kPrepareStages * 16;
constexpr uint32_t kPrepareSmem = kPrepareCountsAt + kPrepareGroups * 4;

static_assert(kPrepareSmem <= 227 * 1024, "more shared memory than a multiprocessor gives one CTA");

struct BwdPrepareParams {
  BwdRowParams rows;
  CUtensorMap out_map, do_map;  // boxes of 64 columns, kQueryBlock rows
};

// Of a group: what it has in shared memory, and the blocks of heads that it takes one after the other: a share of those that are
// needed at once; and then, in some CTAs, of the others. Which block the next one is is looked up one ahead.
struct RowGroup {
  const BwdPrepareParams& p;
  uint32_t zeros, staged, bars, counts;
  const int32_t* blocks;  // in order; NULL: as they come
  int item, following, at_once, items, block, next;
  int round = 0;

  __device__ __forceinline__ RowGroup(const BwdPrepareParams& params, uint32_t base, int group)
      : p(params), zeros(base), staged(base + kPrepareZeros + group * kPrepareStages * 4 * kPrepareHalf),
        bars(base + kPrepareBarriersAt + group * kPrepareStages * 16), counts(base + kPrepareCountsAt + 4 * group),
        item(blockIdx.x * kPrepareGroups + group), items(p.rows.query_blocks * p.rows.heads_q) {
    const bool is_ordered = __ldcg(p.rows.workspace + kInOrderWord) != 0;
    blocks = is_ordered ? p.rows.first_blocks : nullptr;
    at_once = is_ordered ? __ldcg(p.rows.list + kAtOnceWord) * p.rows.heads_q : items;
    if (item >= at_once) item = first_of_others(group);
    following = after(item);
    block = look_up(item);
    next = look_up(following);
  }
  __device__ __forceinline__ int first_of_others(int group) const {
    return blockIdx.x < p.rows.late ? at_once + blockIdx.x * kPrepareGroups + group : items;
  }
  __device__ __forceinline__ int after(int item) const {
    if (item >= at_once) return item + p.rows.late * kPrepareGroups;
    const int step = gridDim.x * kPrepareGroups;
    return item + step < at_once ? item + step : first_of_others(item % kPrepareGroups);
  }
  __device__ __forceinline__ int look_up(int at) const {
    if (at >= items) return 0;
    const int place = at / p.rows.heads_q;
    return blocks != nullptr ? __ldcg(blocks + place) : place;
  }
  __device__ __forceinline__ bool is_left() const { return item < items; }
  __device__ __forceinline__ void advance() {
    item = following;
    following = after(item);
    block = next;
    next = look_up(following);
    ++round;
  }
  __device__ __forceinline__ int head() const { return item % p.rows.heads_q; }
  __device__ __forceinline__ int64_t number() const { return static_cast<int64_t>(head()) * p.rows.query_blocks + block; }
  __device__ __forceinline__ uint32_t stage() const { return round % kPrepareStages; }
  __device__ __forceinline__ uint32_t phase() const { return round / kPrepareStages & 1; }
  // Of the stage: its rows are there; they have been used. And how many blocks' have been.
  __device__ __forceinline__ uint32_t full() const { return bars + 16 * stage(); }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
  __device__ __forceinline__ uint32_t used_count() const { return counts; }
  __device__ __forceinline__ uint32_t rows() const { return staged + stage() * 4 * kPrepareHalf; }
};

// One lane of a group asks for out and dout, if they are needed, and says how many blocks' rows have been used.
__device__ inline void copy_rows(RowGroup g) {
  auto wait_for_stage = [&] {
    mbar_wait(g.empty(), g.phase() ^ 1);
    if (g.round >= kPrepareStages) sts_release(g.used_count(), g.round - kPrepareStages + 1);
  };
  for (; g.is_left(); g.advance()) {
    wait_for_stage();
    if (g.p.rows.out == nullptr) {
      mbar_arrive(g.full());
      continue;
    }
    mbar_expect(g.full(), 4 * kPrepareHalf);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_tile_3d(g.rows() + i * kPrepareHalf, i < 2 ? &g.p.out_map : &g.p.do_map, g.full(), i % 2 * 64, g.block * kQueryBlock, g.head(),
                   kEvictFirst);
  }
  for (int i = 0; i < kPrepareStages; ++i, g.advance()) wait_for_stage();
}

// Another clears the sum of dq, a few blocks at once, and says what is prepared when their rows are there, too. To say so takes longer
// than to compute.
__device__ inline void clear_rows(RowGroup g) {
  const BwdRowParams& p = g.p.rows;
  RowGroup behind = g;  // by so many, so that stores are waited for while the next are on their way
  auto say_prepared = [&](int blocks) {
    while (lds_acquire(g.used_count()) < behind.round + blocks) {
    }
    __threadfence();
    for (; blocks > 0; --blocks, behind.advance()) {
      int32_t* count = p.completion.prepared + behind.block * p.heads_kv + behind.head() / p.heads_per_part;
      add_relaxed(count, 1);
    }
  };
  for (int before = 0, blocks = -1; blocks != 0; before = blocks) {
    for (blocks = 0; blocks < kPrepareBatch && g.is_left(); ++blocks, g.advance()) {
      float* sum = p.dq_sum + g.number() * p.dim_blocks * dq_block_floats(kQueryBlock);
      for (int d = 0; d < p.dim_blocks; ++d) store_bytes(sum + d * dq_block_floats(kQueryBlock), g.zeros, kPrepareZeros, kEvictFirst);
    }
    store_commit();
    store_wait_but_one();
    if (before > 0) say_prepared(before);
  }
  add_released(p.workspace + kPreparedWord, 1);
}

// The other warps compute, eight lanes for a row: out and dout lie in the same swizzle, so in which order columns come does not
// matter. What of a row is read from elsewhere is read one block ahead.
template <typename T>
__device__ __forceinline__ void sum_rows(RowGroup g, int thread) {
  constexpr int kApart = kPrepareWarps * 4, kRows = kQueryBlock / kApart;
  const BwdRowParams& p = g.p.rows;
  const bool has_out = p.out != nullptr;
  const int lane = thread % 8;
  float lse[kRows], delta[kRows], next_lse[kRows], next_delta[kRows];
  auto read = [&](int item, int block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = block * kQueryBlock + thread / 8 + i * kApart;
      const bool exists = item < g.items && token < p.total_q;
      const int64_t at = static_cast<int64_t>(token) * p.heads_q + item % p.heads_q;
      next_lse[i] = exists ? __ldg(p.lse + at) : -INFINITY;
      next_delta[i] = exists && !has_out ? p.delta[at] : 0.f;
    }
  };
  read(g.item, g.block);
  for (; g.is_left(); g.advance()) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      lse[i] = next_lse[i];
      delta[i] = next_delta[i];
    }
    read(g.following, g.next);
    mbar_wait(g.full(), g.phase());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread / 8 + i * kApart, token = g.block * kQueryBlock + row;
      if (has_out) {
        delta[i] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = g.rows() + half * kPrepareHalf + row * 128 + lane * 16;
          delta[i] += chunk_delta<T>(lds_uint4(at), lds_uint4(at + 2 * kPrepareHalf));
        }
        delta[i] = sum_of_lanes(delta[i]);
      }
      const int64_t at = static_cast<int64_t>(token) * p.heads_q + g.head();
      if (lane == 0) write_row<kQueryBlock>(p, g.number(), row, at, token < p.total_q, delta[i], lse[i]);
    }
    __syncwarp();
    if (thread % 32 == 0) mbar_arrive(g.empty());
  }
}

template <typename T>
__global__ void __launch_bounds__(kPrepareThreads, 1) bwd_prepare_listed(const __grid_constant__ BwdPrepareParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  start_next_kernel();
  const uint32_t base = smem_addr(raw);
  for (uint32_t at = 16 * threadIdx.x; at < kPrepareZeros; at += 16 * kPrepareThreads) sts_float4(base + at, 0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x == 0) {
    // One by one: synccheck counts the instructions that do so.
#pragma unroll
    for (int i = 0; i < kPrepareGroups * kPrepareStages; ++i) {
      mbar_init(base + kPrepareBarriersAt + 16 * i, 1);
      mbar_init(base + kPrepareBarriersAt + 16 * i + 8, kPrepareWarps);
    }
  }
  if (threadIdx.x < kPrepareGroups) sts_int(base + kPrepareCountsAt + 4 * threadIdx.x, 0);
  mbar_init_fence();
  fence_async_proxy();
  __syncthreads();
  const int warp = threadIdx.x / 32, group = warp % kPrepareGroups, role = warp / kPrepareGroups;
  const RowGroup rows(p, base, group);
  if (role == 0) {
    if (threadIdx.x % 32 == 0) copy_rows(rows);
  } else if (role == 1) {
    if (threadIdx.x % 32 == 0) clear_rows(rows);
  } else {
    sum_rows<T>(rows, (role - 2) * 32 + threadIdx.x % 32);
  }
  // What comes behind this kernel is behind the one before it, too.
  if (threadIdx.x == 0) wait_for_kernel_before();
}

}  // namespace magi
