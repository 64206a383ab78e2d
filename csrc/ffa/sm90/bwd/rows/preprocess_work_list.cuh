// SPDX-License-Identifier: Apache-2.0
// The kernel before the main one where there is a work list (magi/schedule.h). It is bound by
// device memory, which the main kernel hardly uses. So all SMs prepare only the blocks of queries
// that are needed at once; then a few go on with the others, in the order in which they are needed,
// while the main kernel starts on the rest and waits for each block. To keep the memory busy from a
// few SMs, out and dout come by bulk copies, one block ahead, and dq_accum is cleared by bulk
// stores.
#pragma once

#include "device/tma.cuh"
#include "device/atomics.cuh"
#include "ffa/sm90/bwd/rows/completion.cuh"
#include "ffa/sm90/bwd/rows/preprocess.cuh"
#include "ffa/sm90/bwd/schedule/work_list.cuh"

namespace magi {

// For a CTA; there is one on a multiprocessor. Each group takes a block of a head at a
// time; of wide ones there is room for two.
constexpr int prepare_groups(int queries) { return queries == kBlockM64 ? 3 : 2; }
constexpr int kPreprocessStages = 2;
constexpr int kPreprocessBatch = 2;  // blocks that a group says are prepared at a time

template <int kBlockM>
struct PreprocessShape {
  static constexpr int kGroups = prepare_groups(kBlockM);
  static constexpr int kRows = 2;  // of eight lanes
  static constexpr int kWarps =
      kBlockM / (4 * kRows);  // of a group that compute; two more copy and clear
  static constexpr int kThreads = kGroups * (kWarps + 2) * 32;
  // Shared memory: zeros; for each group and stage out and dout, 64 columns and then the others;
  // two barriers; counts.
  static constexpr uint32_t kHalf = kBlockM * 64 * 2;  // bytes of 64 columns
  static constexpr uint32_t kZeros = dq_block_floats(kBlockM) * 4;
  static constexpr uint32_t kBarriersAt = kZeros + kGroups * kPreprocessStages * 4 * kHalf;
  static constexpr uint32_t kCountsAt = kBarriersAt + kGroups * kPreprocessStages * 16;
  static constexpr uint32_t kSmem = kCountsAt + kGroups * 4;
  static_assert(kSmem <= 227 * 1024, "more shared memory than a multiprocessor gives one CTA");
};

// The first kernel, one CTA: counters as they are at the start of a call.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_reset_counters(const BwdRowParams p) {
  for (int i = threadIdx.x; i < kBwdCounters; i += kThreads) p.workspace[i] = 0;
  for (int i = threadIdx.x; i < p.num_m_blocks * p.heads_kv; i += kThreads)
    p.completion.prepared[i] = 0;
  const int32_t* left = p.work_list + work_list_header(p.work_list).words_left;
  for (int i = threadIdx.x; i < kListedHeadSplits * p.num_tiles * p.heads_kv; i += kThreads)
    p.completion.left[i] = left[i];
  __threadfence();
  __syncthreads();
  start_next_kernel();
}

struct BwdPreprocessParams {
  BwdRowParams rows;
  CUtensorMap out_map, do_map;  // boxes of 64 columns, a block of queries
};

// A group: what it has in shared memory, and the blocks of heads that it takes one after the
// other: a share of those that are needed at once; and then, in some CTAs, of the others. Which
// block the next one is is looked up one ahead.
template <int kBlockM>
struct RowGroup {
  using Shape = PreprocessShape<kBlockM>;
  static constexpr int kGroups = Shape::kGroups;
  const BwdPreprocessParams& p;
  uint32_t zeros, staged, bars, counts;
  const int32_t* blocks;  // in order
  int item, following, at_once, items, block, next;
  int round = 0;

  __device__ __forceinline__ RowGroup(const BwdPreprocessParams& params, uint32_t base, int group)
      : p(params),
        zeros(base),
        staged(base + Shape::kZeros + group * kPreprocessStages * 4 * Shape::kHalf),
        bars(base + Shape::kBarriersAt + group * kPreprocessStages * 16),
        counts(base + Shape::kCountsAt + 4 * group),
        item(blockIdx.x * kGroups + group),
        items(p.rows.num_m_blocks * p.rows.heads_q) {
    const magi_work_list& list = work_list_header(p.rows.work_list);
    blocks = p.rows.work_list + list.words_blocks;
    at_once = list.num_blocks_at_once * p.rows.heads_q;
    if (item >= at_once) item = first_of_others(group);
    following = after(item);
    block = look_up(item);
    next = look_up(following);
  }
  __device__ __forceinline__ int first_of_others(int group) const {
    return blockIdx.x < p.rows.late ? at_once + blockIdx.x * kGroups + group : items;
  }
  __device__ __forceinline__ int after(int item) const {
    if (item >= at_once) return item + p.rows.late * kGroups;
    const int step = gridDim.x * kGroups;
    return item + step < at_once ? item + step : first_of_others(item % kGroups);
  }
  __device__ __forceinline__ int look_up(int at) const {
    if (at >= items) return 0;
    const int place = at / p.rows.heads_q;
    return __ldg(blocks + place);
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
  __device__ __forceinline__ int64_t number() const {
    return static_cast<int64_t>(head()) * p.rows.num_m_blocks + block;
  }
  __device__ __forceinline__ uint32_t stage() const { return round % kPreprocessStages; }
  __device__ __forceinline__ uint32_t phase() const { return round / kPreprocessStages & 1; }
  // Two barriers of the stage: its rows are there; they have been used. A count of blocks that are
  // used.
  __device__ __forceinline__ uint32_t full() const { return bars + 16 * stage(); }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
  __device__ __forceinline__ uint32_t used_count() const { return counts; }
  __device__ __forceinline__ uint32_t rows() const { return staged + stage() * 4 * Shape::kHalf; }
};

// One lane of a group asks for out and dout, if they are needed, and says how many blocks' rows
// have been used.
template <int kBlockM>
__device__ inline void copy_rows(RowGroup<kBlockM> g) {
  constexpr uint32_t kHalf = PreprocessShape<kBlockM>::kHalf;
  auto wait_for_stage = [&] {
    mbar_wait(g.empty(), g.phase() ^ 1);
    if (g.round >= kPreprocessStages) sts_release(g.used_count(), g.round - kPreprocessStages + 1);
  };
  for (; g.is_left(); g.advance()) {
    wait_for_stage();
    if (g.p.rows.out == nullptr) {
      mbar_arrive(g.full());
      continue;
    }
    mbar_expect(g.full(), 4 * kHalf);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_tile_3d(g.rows() + i * kHalf, i < 2 ? &g.p.out_map : &g.p.do_map, g.full(), i % 2 * 64,
                   g.block * kBlockM, g.head(), kEvictFirst);
  }
  for (int i = 0; i < kPreprocessStages; ++i, g.advance()) wait_for_stage();
}

// Another clears the dq accumulator, a few blocks at once, and says what is prepared when their
// rows are there, too. To say so takes longer than to compute.
template <int kBlockM>
__device__ inline void clear_rows(RowGroup<kBlockM> g) {
  const BwdRowParams& p = g.p.rows;
  RowGroup<kBlockM> behind =
      g;  // by so many, so that stores are waited for while the next are on their way
  auto say_prepared = [&](int blocks) {
    while (lds_acquire(g.used_count()) < behind.round + blocks) {
    }
    __threadfence();
    for (; blocks > 0; --blocks, behind.advance()) {
      int32_t* count =
          p.completion.prepared + behind.block * p.heads_kv + behind.head() / p.heads_per_split;
      add_relaxed(count, 1);
    }
  };
  for (int before = 0, blocks = -1; blocks != 0; before = blocks) {
    for (blocks = 0; blocks < kPreprocessBatch && g.is_left(); ++blocks, g.advance()) {
      float* sum = p.dq_accum + g.number() * p.dim_blocks * dq_block_floats(kBlockM);
      for (int d = 0; d < p.dim_blocks; ++d)
        store_bytes(sum + d * dq_block_floats(kBlockM), g.zeros, PreprocessShape<kBlockM>::kZeros,
                    kEvictFirst);
    }
    store_commit();
    store_wait_but_one();
    if (before > 0) say_prepared(before);
  }
  add_released(p.workspace + kPreparedWord, 1);
}

// The other warps compute, eight lanes for a row: out and dout lie in the same swizzle, so in which
// order columns come does not matter. What of a row is read from elsewhere is read one block ahead.
template <typename T, int kBlockM>
__device__ __forceinline__ void sum_rows(RowGroup<kBlockM> g, int thread) {
  using Shape = PreprocessShape<kBlockM>;
  constexpr int kApart = Shape::kWarps * 4, kRows = Shape::kRows;
  static_assert(kApart * kRows == kBlockM, "all rows of a block");
  const BwdRowParams& p = g.p.rows;
  const bool has_out = p.out != nullptr;
  const int lane = thread % 8;
  float lse[kRows], delta[kRows], next_lse[kRows], next_delta[kRows];
  auto read = [&](int item, int block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = block * kBlockM + thread / 8 + i * kApart;
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
      const int row = thread / 8 + i * kApart, token = g.block * kBlockM + row;
      if (has_out) {
        delta[i] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = g.rows() + half * Shape::kHalf + row * 128 + lane * 16;
          delta[i] += chunk_delta<T>(lds_uint4(at), lds_uint4(at + 2 * Shape::kHalf));
        }
        delta[i] = sum_of_lanes(delta[i]);
      }
      const int64_t at = static_cast<int64_t>(token) * p.heads_q + g.head();
      if (lane == 0)
        write_row<kBlockM>(p, g.number(), row, at, token < p.total_q, delta[i], lse[i]);
    }
    __syncwarp();
    if (thread % 32 == 0) mbar_arrive(g.empty());
  }
}

template <typename T, int kBlockM>
__global__ void __launch_bounds__(PreprocessShape<kBlockM>::kThreads, 1)
    bwd_preprocess_work_list(const __grid_constant__ BwdPreprocessParams p) {
  using Shape = PreprocessShape<kBlockM>;
  extern __shared__ __align__(1024) uint8_t raw[];
  start_next_kernel();
  const uint32_t base = smem_addr(raw);
  for (uint32_t at = 16 * threadIdx.x; at < Shape::kZeros; at += 16 * Shape::kThreads)
    sts_float4(base + at, 0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x == 0) {
    // One by one: synccheck counts the instructions that do so.
#pragma unroll
    for (int i = 0; i < Shape::kGroups * kPreprocessStages; ++i) {
      mbar_init(base + Shape::kBarriersAt + 16 * i, 1);
      mbar_init(base + Shape::kBarriersAt + 16 * i + 8, Shape::kWarps);
    }
  }
  if (threadIdx.x < Shape::kGroups) sts_int(base + Shape::kCountsAt + 4 * threadIdx.x, 0);
  mbar_init_fence();
  fence_async_proxy();
  __syncthreads();
  const int warp = threadIdx.x / 32, group = warp % Shape::kGroups, role = warp / Shape::kGroups;
  const RowGroup<kBlockM> rows(p, base, group);
  if (role == 0) {
    if (threadIdx.x % 32 == 0) copy_rows(rows);
  } else if (role == 1) {
    if (threadIdx.x % 32 == 0) clear_rows(rows);
  } else {
    sum_rows<T, kBlockM>(rows, (role - 2) * 32 + threadIdx.x % 32);
  }
  // What comes behind this kernel is behind the one before it, too.
  if (threadIdx.x == 0) wait_for_kernel_before();
}

}  // namespace magi
