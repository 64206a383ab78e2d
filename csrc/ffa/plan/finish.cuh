// SPDX-License-Identifier: Apache-2.0
// Second kernel of the device tile planner: its first CTA orders the tiles by cost and completes
// the header, the others mark the segments that may touch unseen keys.
#pragma once

#include "ffa/plan/params.cuh"

namespace magi {
namespace tile {
inline namespace planner {

constexpr int32_t kFinishThreads = 1024;
constexpr int32_t kFinishWarps = kFinishThreads / 32;
constexpr int32_t kRankedTiles = 4096;  // ordered by counting in shared memory
constexpr int32_t kDigitBits = 4, kDigits = 1 << kDigitBits;

// Inclusive scans over the CTA. `warps` is shared, one word per warp.
struct Sum {
  __device__ static int32_t combine(int32_t a, int32_t b) { return a + b; }
};
struct Max {
  __device__ static int32_t combine(int32_t a, int32_t b) { return max(a, b); }
};

template <typename Op>
__device__ int32_t scan_cta(int32_t value, int32_t* warps) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value = Op::combine(other, value);
  }
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int32_t total = warps[lane];
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, total, step);
      if (lane >= step) total = Op::combine(other, total);
    }
    warps[lane] = total;
  }
  __syncthreads();
  if (warp > 0) value = Op::combine(warps[warp - 1], value);
  return value;
}

// Tiles by decreasing cost, ties by id: a tile's place is the number of tiles before it.
__device__ void order_by_rank(const PlanParams& p, int32_t* costs) {
  const magi_tile_desc* tiles = p.tiles();
  for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads) costs[t] = tiles[t].cost;
  __syncthreads();
  for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads) {
    const int32_t cost = costs[t];
    int32_t place = 0;
    for (int32_t other = 0; other < p.num_tiles; ++other) {
      place += costs[other] > cost || (costs[other] == cost && other < t);
    }
    p.order()[place] = t;
  }
}

// Costs of all tiles: the largest, and by how much the smallest is below it.
__device__ void cost_range(const PlanParams& p, int32_t* warps, int32_t& largest, uint32_t& span) {
  const magi_tile_desc* tiles = p.tiles();
  int32_t high = 0, low = kInt32Max;
  for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads) {
    high = max(high, tiles[t].cost);
    low = min(low, tiles[t].cost);
  }
  scan_cta<Max>(high, warps);
  largest = warps[kFinishWarps - 1];
  __syncthreads();
  scan_cta<Max>(-low, warps);
  span = static_cast<uint32_t>(largest + warps[kFinishWarps - 1]);
  __syncthreads();
}

// The same by a stable radix sort in global memory, a run of tiles per thread. The second buffer is
// a reserved word of the tile descriptions.
__device__ void order_by_radix(const PlanParams& p, int32_t* counts, int32_t* warps) {
  magi_tile_desc* tiles = p.tiles();
  int32_t* order = p.order();
  int32_t largest;
  uint32_t span;
  cost_range(p, warps, largest, span);
  int32_t passes = 1;
  while (passes * kDigitBits < 32 && span >> (passes * kDigitBits) != 0) ++passes;
  const int64_t run = (static_cast<int64_t>(p.num_tiles) + kFinishThreads - 1) / kFinishThreads;
  const int32_t begin =
      static_cast<int32_t>(min(run * threadIdx.x, static_cast<int64_t>(p.num_tiles)));
  const int32_t end =
      static_cast<int32_t>(min(run * threadIdx.x + run, static_cast<int64_t>(p.num_tiles)));
  for (int32_t pass = 0; pass < passes; ++pass) {
    const bool into_order = (passes - pass) % 2 == 1;
    const int32_t shift = pass * kDigitBits;
    const auto source = [&](int32_t i) {
      return pass == 0 ? i : into_order ? tiles[i].reserved[0] : order[i];
    };
    const auto digit = [&](int32_t t) {
      return static_cast<uint32_t>(largest - tiles[t].cost) >> shift & (kDigits - 1);
    };
    for (int32_t d = 0; d < kDigits; ++d) counts[d * kFinishThreads + threadIdx.x] = 0;
#pragma unroll 4
    for (int32_t i = begin; i < end; ++i) ++counts[digit(source(i)) * kFinishThreads + threadIdx.x];
    __syncthreads();
    int32_t* mine = counts + threadIdx.x * kDigits;  // a run of the digit-major table
    int32_t sum = 0;
    for (int32_t j = 0; j < kDigits; ++j) sum += mine[j];
    int32_t place = scan_cta<Sum>(sum, warps) - sum;
    for (int32_t j = 0; j < kDigits; ++j) {
      const int32_t count = mine[j];
      mine[j] = place;
      place += count;
    }
    __syncthreads();
#pragma unroll 4
    for (int32_t i = begin; i < end; ++i) {
      const int32_t t = source(i);
      const int32_t at = counts[digit(t) * kFinishThreads + threadIdx.x]++;
      if (into_order) {
        order[at] = t;
      } else {
        tiles[at].reserved[0] = t;
      }
    }
    __syncthreads();
  }
  for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads) tiles[t].reserved[0] = 0;
}

// Everything but has_unseen, which belongs to another CTA, and status, which is there already.
__device__ void write_header(const PlanParams& p) {
  magi_tile_plan_header* header = p.header();
  const bool fits = header->status == 0;
  const int32_t used = fits ? static_cast<int32_t>(*p.taken()) : 0;
  describe_plan(*header, p.shape, p.total_q, p.total_k,
                p.num_tiles);  // clears `taken`, which is read above
  if (!fits) header->num_segments = 0;
  header->words_total = p.words_records + used * segment_words(p.shape.tile_tokens);
}

// Sorts key ranges by their start; size is a power of two.
__device__ void sort_ranges(int32_t* lo, int32_t* hi, int32_t size) {
  for (int32_t run = 2; run <= size; run *= 2) {
    for (int32_t step = run / 2; step > 0; step /= 2) {
      for (int32_t i = threadIdx.x; i < size / 2; i += kFinishThreads) {
        const int32_t a = 2 * i - (i & (step - 1)), b = a + step;
        const int32_t x = lo[a], y = lo[b];
        if ((a & run) == 0 ? y < x : x < y) {
          lo[a] = y;
          lo[b] = x;
          const int32_t other = hi[a];
          hi[a] = hi[b];
          hi[b] = other;
        }
      }
      __syncthreads();
    }
  }
}

// Unites sorted ranges in place: disjoint, not abutting. Returns how many are left. Empty places
// start at kInt32Max.
__device__ int32_t unite_ranges(int32_t* lo, int32_t* hi, int32_t size, int32_t* warps) {
  int32_t count = 0, reached = -1;
  for (int32_t first = 0; first < size; first += kFinishThreads) {
    const int32_t i = first + threadIdx.x;
    const int32_t start = i < size ? lo[i] : kInt32Max;
    const int32_t stop = start < kInt32Max ? hi[i] : -1;
    // The largest end before this range: that of the neighbour below, or of the earlier rounds.
    const int32_t upto = max(reached, scan_cta<Max>(stop, warps));
    const int32_t most = max(reached, warps[kFinishWarps - 1]);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t before = __shfl_up_sync(kAll, upto, 1);
    if (lane == 0) before = warp > 0 ? max(reached, warps[warp - 1]) : reached;
    __syncthreads();
    const bool is_new = start < kInt32Max && start > before;
    const int32_t place = count + scan_cta<Sum>(is_new, warps) - 1;
    count += warps[kFinishWarps - 1];
    if (is_new) {
      lo[place] = start;
      if (place > 0) hi[place - 1] = before;
    }
    reached = most;
    __syncthreads();
  }
  if (threadIdx.x == 0 && count > 0) hi[count - 1] = reached;
  __syncthreads();
  return count;
}

// Union of the keys that some query sees, in shared memory. -1 if its parts fill the memory.
__device__ int32_t seen_ranges(const PlanParams& p, int32_t* lo, int32_t* hi, int32_t* warps) {
  int32_t count = 0;
  for (int32_t next = 0; next < p.num_slices;) {
    if (count > p.max_ranges / 4 * 3) return -1;  // each round must take in a good many
    const int32_t take = min(p.max_ranges - count, p.num_slices - next);
    int32_t size = 2;
    while (size < count + take) size *= 2;
    for (int32_t i = threadIdx.x; i < size - count; i += kFinishThreads) {
      Slice s;
      const bool is_slice = i < take && load_slice(p, next + i, p.q_ranges[next + i], s);
      lo[count + i] = is_slice ? s.k0 : kInt32Max;
      hi[count + i] = is_slice ? s.k1 : 0;
    }
    __syncthreads();
    sort_ranges(lo, hi, size);
    count = unite_ranges(lo, hi, size, warps);
    next += take;
  }
  return count;
}

// Marks the segments that may touch an unseen key. Where the union of the keys was too long to
// tell, all are marked.
__device__ void mark_unseen(const PlanParams& p, int32_t* lo, int32_t* warps) {
  int32_t* hi = lo + p.max_ranges;
  const int32_t count = seen_ranges(p, lo, hi, warps);
  const bool has_unseen = count < 0 || !all_seen(lo, hi, count, 0, p.total_k, p.total_k);
  if (blockIdx.x == 1 && threadIdx.x == 0) p.header()->has_unseen = has_unseen;
  if (!has_unseen) return;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const magi_tile_desc* tiles = p.tiles();
  for (int64_t t = (blockIdx.x - 1) * kFinishWarps + warp; t < p.num_tiles;
       t += (gridDim.x - 1) * kFinishWarps) {
    const int32_t first = tiles[t].segment_begin, num_segments = tiles[t].num_segments;
    for (int32_t i = lane; i < num_segments; i += 32) {
      magi_tile_segment* segment = segment_head(p.record(first + static_cast<int64_t>(i)));
      if (count < 0 ||
          touches_unseen(lo, hi, count, segment->visit_lo, segment->visit_hi, p.total_k))
        segment->has_unseen = 1;
    }
  }
}

// The first CTA orders the tiles and completes the header, the others mark segments.
__global__ void __launch_bounds__(kFinishThreads, 1) finish_plan(const PlanParams p) {
  extern __shared__ __align__(16) int32_t work[];
  __shared__ int32_t warps[32];
  if (blockIdx.x > 0) {
    mark_unseen(p, work, warps);
    return;
  }
  if (p.num_tiles <= kRankedTiles) {
    order_by_rank(p, work);
  } else {
    order_by_radix(p, work, warps);
  }
  for (int32_t i = p.num_tiles + threadIdx.x; i < p.words_records - p.words_order;
       i += kFinishThreads) {
    p.order()[i] = 0;
  }
  if (p.header()->status != 0) {
    for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads)
      p.tiles()[t].num_segments = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) write_header(p);
}

}  // namespace planner
}  // namespace tile
}  // namespace magi
