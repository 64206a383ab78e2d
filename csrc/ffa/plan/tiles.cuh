// SPDX-License-Identifier: Apache-2.0
// First kernel of the device tile planner: one warp per tile finds the slices that touch it and
// builds its segments.
#pragma once

#include "ffa/plan/params.cuh"

namespace magi {
namespace tile {
inline namespace planner {

constexpr int32_t kPlanWarps = 4;
constexpr int32_t kListKeys = 128;    // slices of a tile that are sorted at a time
constexpr int32_t kPoolWords = 2048;  // records under construction, per warp

struct WarpTeam {
  __device__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ int32_t size() const { return 32; }
  __device__ void sync() const { __syncwarp(); }
  __device__ bool any(bool value) const { return __any_sync(kAll, value); }
  __device__ int32_t min(int32_t value) const { return __reduce_min_sync(kAll, value); }
  __device__ int32_t max(int32_t value) const { return __reduce_max_sync(kAll, value); }
};

// The segments of a tile: the first few in shared memory, all others in the plan at once. Those
// need a place for all the segments that the tile may still get; a tile that stays in shared memory
// takes only what it uses.
struct WarpPool {
  const PlanParams& p;
  int32_t* local;
  int32_t num_local;   // records that fit there
  int32_t num_pieces;  // upper bound of the segments
  int32_t base = -1;   // first record in the plan

  __device__ bool reserve(int32_t count) {
    unsigned long long first = 0;
    if (threadIdx.x % 32 == 0) first = atomicAdd(p.taken(), static_cast<unsigned long long>(count));
    first = __shfl_sync(kAll, first, 0);
    if (first + count > static_cast<unsigned long long>(p.capacity)) return false;
    base = static_cast<int32_t>(first);
    return true;
  }
  __device__ int32_t* record(int32_t i) {
    if (i < num_local) return local + i * segment_words(p.shape.tile_tokens);
    if (base < 0 && !reserve(num_pieces)) return nullptr;
    return p.record(base + static_cast<int64_t>(i));
  }
};

__device__ void sort_keys(SliceKey* keys, int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  int32_t size = 2;
  while (size < count) size *= 2;
  for (int32_t i = count + lane; i < size; i += 32)
    keys[i] = SliceKey{kInt32Max, kInt32Max, kInt32Max};
  __syncwarp();
  for (int32_t run = 2; run <= size; run *= 2) {
    for (int32_t step = run / 2; step > 0; step /= 2) {
      for (int32_t i = lane; i < size / 2; i += 32) {
        const int32_t a = 2 * i - (i & (step - 1)), b = a + step;
        const SliceKey x = keys[a], y = keys[b];
        if ((a & run) == 0 ? y < x : x < y) {
          keys[a] = y;
          keys[b] = x;
        }
      }
      __syncwarp();
    }
  }
}

struct Gathered {
  int32_t count;       // keys in the list, sorted
  int32_t num_pieces;  // slices that touch the tile
  bool has_more;       // keys beyond the last one in the list were left out
};

// The smallest keys above `after` of the slices that touch tokens [token0, end); all of them where
// the list holds them.
__device__ Gathered gather_keys(const PlanParams& p, int32_t token0, int32_t end, SliceKey after,
                                SliceKey* keys) {
  const int32_t lane = threadIdx.x % 32;
  Gathered out{0, 0, false};
  SliceKey bound{kInt32Max, kInt32Max, kInt32Max};
  for (int32_t first = 0; first < p.num_slices; first += 32) {
    const int32_t i = first + lane;
    const int2 q = i < p.num_slices ? p.q_ranges[i] : make_int2(0, 0);
    SliceKey key = bound;
    bool touches = q.x < end && q.y > token0 && q.x < q.y;
    if (__any_sync(kAll, touches)) {
      if (touches) {
        Slice s;
        touches = load_slice(p, i, q, s) && s.q0 < end && s.q1 > token0;
        if (touches) key = slice_key(s, i, token0);
      }
      out.num_pieces += __popc(__ballot_sync(kAll, touches));
      uint32_t wanted = __ballot_sync(kAll, touches && after < key && key < bound);
      if (out.count + __popc(wanted) > kListKeys) {
        __syncwarp();
        sort_keys(keys, out.count);
        out.count = kListKeys / 2;
        out.has_more = true;
        bound = keys[out.count - 1];
        wanted = __ballot_sync(kAll, touches && after < key && key < bound);
      }
      if (wanted >> lane & 1) keys[out.count + __popc(wanted & ((1u << lane) - 1))] = key;
      out.count += __popc(wanted);
    }
    if (first > kInt32Max - 32) break;
  }
  __syncwarp();
  sort_keys(keys, out.count);
  return out;
}

// Builds the segments of a tile; their number, or -1 if there is no room.
__device__ int32_t build_segments(const PlanParams& p, WarpPool& pool, int32_t token0,
                                  int32_t num_tokens, SliceKey* keys) {
  const WarpTeam team;
  OpenSegment open[kOpenSegments];
  int32_t num_segments = 0;
  SliceKey after{-1, -1, -1};
  while (true) {
    const Gathered batch = gather_keys(p, token0, token0 + num_tokens, after, keys);
    pool.num_pieces = batch.num_pieces;
    for (int32_t i = 0; i < batch.count; ++i) {
      Slice s;
      load_slice(p, keys[i].id, p.q_ranges[keys[i].id], s);
      const Piece piece = make_piece(s, token0, num_tokens);
      if (!place_piece(team, pool, p.shape, num_tokens, piece, open, num_segments)) return -1;
    }
    if (!batch.has_more) return num_segments;
    after = keys[batch.count - 1];
    __syncwarp();
  }
}

__device__ bool store_segments(const PlanParams& p, WarpPool& pool, int32_t num_segments) {
  if (num_segments == 0) return true;
  if (pool.base < 0 && !pool.reserve(num_segments)) return false;
  const int32_t count = min(num_segments, pool.num_local) * segment_words(p.shape.tile_tokens) / 4;
  int4* to = reinterpret_cast<int4*>(p.record(pool.base));
  const int4* from = reinterpret_cast<const int4*>(pool.local);
  for (int32_t i = threadIdx.x % 32; i < count; i += 32) to[i] = from[i];
  return true;
}

// One warp. `key_blocks` gets the blocks of the tile added.
__device__ void plan_one_tile(const PlanParams& p, int32_t t, SliceKey* keys, int32_t* records,
                              unsigned long long* key_blocks) {
  const int32_t token0 = t * p.shape.tile_tokens;
  const int32_t num_tokens = min(p.shape.tile_tokens, p.total_q - token0);
  WarpPool pool{p, records, kPoolWords / segment_words(p.shape.tile_tokens), 0};
  int32_t num_segments = build_segments(p, pool, token0, num_tokens, keys);
  // Unseen keys are the second kernel's matter.
  const int32_t seen_lo = 0, seen_hi = p.total_k;
  SegmentSums sums;
  for (int32_t i = 0; i < num_segments; ++i)
    finish_segment(WarpTeam(), pool.record(i), p.shape, &seen_lo, &seen_hi, 1, p.total_k, sums);
  const bool fits = num_segments >= 0 && store_segments(p, pool, num_segments);
  if (!fits) num_segments = 0;
  if (threadIdx.x % 32 != 0) return;
  int4* desc = reinterpret_cast<int4*>(p.tiles() + t);
  desc[0] = make_int4(token0, num_tokens, num_segments > 0 ? pool.base : 0, num_segments);
  desc[1] = make_int4(to_int32(sums.cost), to_int32(sums.num_blocks), 0, 0);
  if (!fits) {
    atomicExch(&p.header()->status, static_cast<int32_t>(MAGI_CAPACITY));
  } else if (num_segments > 0) {
    atomicAdd(&p.header()->num_segments, num_segments);
    for (int32_t i = 0; i < MAGI_KEY_BLOCK_SIZES; ++i)
      atomicAdd(key_blocks + i, static_cast<unsigned long long>(sums.num_key_blocks[i]));
  }
}

// One warp per tile.
__global__ void __launch_bounds__(32 * kPlanWarps) plan_tiles(const PlanParams p) {
  __shared__ SliceKey keys[kPlanWarps][kListKeys];
  __shared__ __align__(16) int32_t records[kPlanWarps][kPoolWords];
  __shared__ unsigned long long key_blocks[MAGI_KEY_BLOCK_SIZES];
  if (threadIdx.x < MAGI_KEY_BLOCK_SIZES) key_blocks[threadIdx.x] = 0;
  __syncthreads();
  const int32_t warp = threadIdx.x / 32;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kPlanWarps + warp;
  if (t < p.num_tiles)
    plan_one_tile(p, static_cast<int32_t>(t), keys[warp], records[warp], key_blocks);
  __syncthreads();
  // All CTAs add to the same few words, so one addition of each for all of its tiles.
  if (threadIdx.x < MAGI_KEY_BLOCK_SIZES)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.header()->num_key_blocks + threadIdx.x),
              key_blocks[threadIdx.x]);
}

}  // namespace planner
}  // namespace tile
}  // namespace magi
