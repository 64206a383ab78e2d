// SPDX-License-Identifier: Apache-2.0
// Device producer of the tile plan: one warp per tile finds its slices and builds its layers, then a second kernel
// orders the tiles, marks layers that may touch unseen keys and completes the header. No host synchronisation, no
// memory besides the plan.
//
// Tiles take room for their records from a counter, so where the records lie differs from run to run; what they hold
// does not, and equals what the host producer makes. Slices with a range outside [0, total), with end < start or of
// an unknown type are left out.

#include <cuda_runtime.h>

#include "../common/host.h"

// Teams and pools of the shared header have device members only.
#pragma nv_diag_suppress 20011, 20012, 20014
#include "planner/tile_core.h"

namespace magi {
namespace tile {
namespace {

constexpr int32_t kPlanWarps = 4;
constexpr int32_t kListKeys = 128;       // slices of a tile that are sorted at a time
constexpr int32_t kPoolWords = 2048;     // records under construction, per warp
constexpr int32_t kFinishThreads = 1024;
constexpr int32_t kFinishWarps = kFinishThreads / 32;
constexpr int32_t kFlagBlocks = 32;      // CTAs that mark layers
constexpr int32_t kRankedTiles = 4096;   // ordered by counting in shared memory
constexpr int32_t kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int32_t kMaxRanges = 16384;    // key ranges merged at a time
constexpr uint32_t kAll = 0xffffffffu;

struct PlanParams {
  const int2* q_ranges;
  const int2* k_ranges;
  const int32_t* types;  // or NULL
  int32_t num_slices, total_q, total_k, num_tiles;
  Shape shape;
  int32_t* plan;
  int32_t words_order, words_records;
  int32_t capacity;    // records
  int32_t max_ranges;  // key ranges that the finishing kernel's shared memory holds, a power of two

  __device__ magi_tile_plan_header* header() const { return reinterpret_cast<magi_tile_plan_header*>(plan); }
  __device__ magi_tile_desc* tiles() const { return reinterpret_cast<magi_tile_desc*>(plan + kHeaderWords); }
  __device__ int32_t* order() const { return plan + words_order; }
  __device__ int32_t* record(int64_t i) const { return plan + words_records + i * layer_words(shape.tile_tokens); }
  // Records taken so far. Lives in the header's reserved words, which the second kernel clears.
  __device__ unsigned long long* taken() const {
    return reinterpret_cast<unsigned long long*>(header()->reserved);
  }
};

// Slice i, trimmed; false if it is malformed or allows nothing. Its queries are given, since callers look at them first.
__device__ bool load_slice(const PlanParams& p, int32_t i, int2 q, Slice& s) {
  const int2 k = p.k_ranges[i];
  s = Slice{q.x, q.y, k.x, k.y, p.types != nullptr ? p.types[i] : 0};
  if (s.q0 < 0 || s.q1 > p.total_q || s.k0 < 0 || s.k1 > p.total_k || s.type < 0 || s.type > 3) return false;
  return trim_slice(s);
}

struct WarpTeam {
  __device__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ int32_t size() const { return 32; }
  __device__ void sync() const { __syncwarp(); }
  __device__ bool any(bool value) const { return __any_sync(kAll, value); }
  __device__ int32_t min(int32_t value) const { return __reduce_min_sync(kAll, value); }
  __device__ int32_t max(int32_t value) const { return __reduce_max_sync(kAll, value); }
};

// The layers of a tile: the first few in shared memory, all others in the plan at once. Those need a place for all
// the layers that the tile may still get; a tile that stays in shared memory takes only what it uses.
struct WarpPool {
  const PlanParams& p;
  int32_t* local;
  int32_t num_local;   // records that fit there
  int32_t num_pieces;  // upper bound of the layers
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
    if (i < num_local) return local + i * layer_words(p.shape.tile_tokens);
    if (base < 0 && !reserve(num_pieces)) return nullptr;
    return p.record(base + static_cast<int64_t>(i));
  }
};

__device__ void sort_keys(SliceKey* keys, int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  int32_t size = 2;
  while (size < count) size *= 2;
  for (int32_t i = count + lane; i < size; i += 32) keys[i] = SliceKey{kInt32Max, kInt32Max, kInt32Max};
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

// The smallest keys above `after` of the slices that touch tokens [token0, end); all of them where the list holds them.
__device__ Gathered gather_keys(const PlanParams& p, int32_t token0, int32_t end, SliceKey after, SliceKey* keys) {
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

// Builds the layers of a tile; their number, or -1 if there is no room.
__device__ int32_t build_layers(const PlanParams& p, WarpPool& pool, int32_t token0, int32_t num_tokens,
                                SliceKey* keys) {
  const WarpTeam team;
  OpenLayer open[kOpenLayers];
  int32_t num_layers = 0;
  SliceKey after{-1, -1, -1};
  while (true) {
    const Gathered batch = gather_keys(p, token0, token0 + num_tokens, after, keys);
    pool.num_pieces = batch.num_pieces;
    for (int32_t i = 0; i < batch.count; ++i) {
      Slice s;
      load_slice(p, keys[i].id, p.q_ranges[keys[i].id], s);
      const Piece piece = make_piece(s, token0, num_tokens);
      if (!place_piece(team, pool, p.shape, num_tokens, piece, open, num_layers)) return -1;
    }
    if (!batch.has_more) return num_layers;
    after = keys[batch.count - 1];
    __syncwarp();
  }
}

__device__ bool store_layers(const PlanParams& p, WarpPool& pool, int32_t num_layers) {
  if (num_layers == 0) return true;
  if (pool.base < 0 && !pool.reserve(num_layers)) return false;
  const int32_t count = min(num_layers, pool.num_local) * layer_words(p.shape.tile_tokens) / 4;
  int4* to = reinterpret_cast<int4*>(p.record(pool.base));
  const int4* from = reinterpret_cast<const int4*>(pool.local);
  for (int32_t i = threadIdx.x % 32; i < count; i += 32) to[i] = from[i];
  return true;
}

// One warp per tile.
__global__ void __launch_bounds__(32 * kPlanWarps) plan_tiles(const PlanParams p) {
  __shared__ SliceKey all_keys[kPlanWarps][kListKeys];
  __shared__ __align__(16) int32_t all_records[kPlanWarps][kPoolWords];
  const int32_t warp = threadIdx.x / 32;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kPlanWarps + warp;
  if (t >= p.num_tiles) return;
  const int32_t token0 = static_cast<int32_t>(t * p.shape.tile_tokens);
  const int32_t num_tokens = min(p.shape.tile_tokens, p.total_q - token0);
  WarpPool pool{p, all_records[warp], kPoolWords / layer_words(p.shape.tile_tokens), 0};
  int32_t num_layers = build_layers(p, pool, token0, num_tokens, all_keys[warp]);
  // Unseen keys are the second kernel's matter.
  const int32_t seen_lo = 0, seen_hi = p.total_k;
  int64_t cost = kTileCost, blocks = 0;
  for (int32_t i = 0; i < num_layers; ++i) {
    finish_layer(WarpTeam(), pool.record(i), p.shape, &seen_lo, &seen_hi, 1, p.total_k, cost, blocks);
  }
  const bool fits = num_layers >= 0 && store_layers(p, pool, num_layers);
  if (!fits) num_layers = 0;
  if (threadIdx.x % 32 != 0) return;
  int4* desc = reinterpret_cast<int4*>(p.tiles() + t);
  const int32_t cost32 = static_cast<int32_t>(cost < kInt32Max ? cost : kInt32Max);
  const int32_t blocks32 = static_cast<int32_t>(blocks < kInt32Max ? blocks : kInt32Max);
  desc[0] = make_int4(token0, num_tokens, num_layers > 0 ? pool.base : 0, num_layers);
  desc[1] = make_int4(cost32, blocks32, 0, 0);
  if (!fits) {
    atomicExch(&p.header()->status, static_cast<int32_t>(MAGI_CAPACITY));
  } else if (num_layers > 0) {
    atomicAdd(&p.header()->num_layers, num_layers);
  }
}

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

// The same by a stable radix sort in global memory, a run of tiles per thread. The second buffer is a reserved word of
// the tile descriptions.
__device__ void order_by_radix(const PlanParams& p, int32_t* counts, int32_t* warps) {
  magi_tile_desc* tiles = p.tiles();
  int32_t* order = p.order();
  int32_t largest;
  uint32_t span;
  cost_range(p, warps, largest, span);
  int32_t passes = 1;
  while (passes * kDigitBits < 32 && span >> (passes * kDigitBits) != 0) ++passes;
  const int64_t run = (static_cast<int64_t>(p.num_tiles) + kFinishThreads - 1) / kFinishThreads;
  const int32_t begin = static_cast<int32_t>(min(run * threadIdx.x, static_cast<int64_t>(p.num_tiles)));
  const int32_t end = static_cast<int32_t>(min(run * threadIdx.x + run, static_cast<int64_t>(p.num_tiles)));
  for (int32_t pass = 0; pass < passes; ++pass) {
    const bool into_order = (passes - pass) % 2 == 1;
    const int32_t shift = pass * kDigitBits;
    const auto source = [&](int32_t i) { return pass == 0 ? i : into_order ? tiles[i].reserved[0] : order[i]; };
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
  header->version = MAGI_ABI_VERSION;
  header->total_q = p.total_q;
  header->total_k = p.total_k;
  header->tile_tokens = p.shape.tile_tokens;
  header->num_groups = p.shape.num_groups;
  header->num_tiles = p.num_tiles;
  if (!fits) header->num_layers = 0;
  header->layer_words = layer_words(p.shape.tile_tokens);
  header->words_tiles = kHeaderWords;
  header->words_order = p.words_order;
  header->words_records = p.words_records;
  header->words_total = p.words_records + used * layer_words(p.shape.tile_tokens);
  header->reserved[0] = header->reserved[1] = 0;
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

// Unites sorted ranges in place: disjoint, not abutting. Returns how many are left. Empty places start at kInt32Max.
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

// Marks the layers that may touch an unseen key. Where the union of the keys was too long to tell, all are marked.
__device__ void mark_unseen(const PlanParams& p, int32_t* lo, int32_t* warps) {
  int32_t* hi = lo + p.max_ranges;
  const int32_t count = seen_ranges(p, lo, hi, warps);
  const bool has_unseen = count < 0 || !all_seen(lo, hi, count, 0, p.total_k, p.total_k);
  if (blockIdx.x == 1 && threadIdx.x == 0) p.header()->has_unseen = has_unseen;
  if (!has_unseen) return;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const magi_tile_desc* tiles = p.tiles();
  for (int64_t t = (blockIdx.x - 1) * kFinishWarps + warp; t < p.num_tiles; t += (gridDim.x - 1) * kFinishWarps) {
    const int32_t first = tiles[t].layer_begin, num_layers = tiles[t].num_layers;
    for (int32_t i = lane; i < num_layers; i += 32) {
      magi_layer* layer = layer_head(p.record(first + static_cast<int64_t>(i)));
      const int32_t lowest = layer->visit_lo - (kKeyBlock - 1);  // where the last block may begin
      if (count < 0 || !all_seen(lo, hi, count, lowest, layer->visit_hi, p.total_k)) layer->has_unseen = 1;
    }
  }
}

// The first CTA orders the tiles and completes the header, the others mark layers.
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
  for (int32_t i = p.num_tiles + threadIdx.x; i < p.words_records - p.words_order; i += kFinishThreads) {
    p.order()[i] = 0;
  }
  if (p.header()->status != 0) {
    for (int32_t t = threadIdx.x; t < p.num_tiles; t += kFinishThreads) p.tiles()[t].num_layers = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) write_header(p);
}

int32_t finish_shared_bytes(const PlanParams& p) {
  const int32_t order_words = p.num_tiles <= kRankedTiles ? p.num_tiles : kDigits * kFinishThreads;
  return 4 * max_of(order_words, 2 * p.max_ranges);
}

magi_status launch_plan(const PlanParams& p, cudaStream_t stream) {
  MAGI_RETURN(cuda_status(cudaMemsetAsync(p.plan, 0, sizeof(magi_tile_plan_header), stream),
                          "clearing the header of the tile plan"));
  if (p.num_tiles > 0) {
    const uint32_t ctas = (static_cast<uint32_t>(p.num_tiles) + kPlanWarps - 1) / kPlanWarps;
    plan_tiles<<<ctas, 32 * kPlanWarps, 0, stream>>>(p);
    MAGI_RETURN(cuda_status(cudaGetLastError(), "launching the tile planner"));
  }
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(finish_plan, cudaFuncAttributeMaxDynamicSharedMemorySize, 8 * kMaxRanges);
  }));
  const int32_t mark_ctas = max_of(1, min_of(kFlagBlocks, (p.num_tiles - 1) / kFinishWarps + 1));
  finish_plan<<<1 + mark_ctas, kFinishThreads, finish_shared_bytes(p), stream>>>(p);
  return cuda_status(cudaGetLastError(), "launching the end of the tile planner");
}

magi_status check_arguments(const PlanParams& p, int64_t plan_words, int64_t fixed_words) {
  if (p.total_q < 0 || p.total_k < 0 || p.num_slices < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q is %d, total_k %d and num_slices %d; none may be negative.", p.total_q,
                p.total_k, p.num_slices);
  if (p.shape.tile_tokens < 1 || p.shape.tile_tokens > kMaxTileTokens || p.shape.num_groups < 1 ||
      p.shape.num_groups > kMaxGroups)
    return fail(MAGI_INVALID_ARGUMENT, "tile_tokens is %d and num_groups %d; they must be 1 to %d and 1 to %d.",
                p.shape.tile_tokens, p.shape.num_groups, kMaxTileTokens, kMaxGroups);
  if (p.num_slices > 0 && (p.q_ranges == nullptr || p.k_ranges == nullptr))
    return fail(MAGI_INVALID_ARGUMENT, "q_ranges or k_ranges is NULL; give %d pairs in each.", p.num_slices);
  if (reinterpret_cast<uintptr_t>(p.q_ranges) % 8 || reinterpret_cast<uintptr_t>(p.k_ranges) % 8)
    return fail(MAGI_INVALID_ARGUMENT, "q_ranges and k_ranges must lie at multiples of 8 bytes.");
  if (p.plan == nullptr || reinterpret_cast<uintptr_t>(p.plan) % 16)
    return fail(MAGI_INVALID_ARGUMENT, "plan must be device memory at a multiple of 16 bytes.");
  if (plan_words < fixed_words || fixed_words > kInt32Max)
    return fail(MAGI_CAPACITY, "The buffer has %lld words; the plan needs %lld without any layer, 2^31 - 1 at most.",
                static_cast<long long>(plan_words), static_cast<long long>(fixed_words));
  return MAGI_OK;
}

}  // namespace
}  // namespace tile
}  // namespace magi

extern "C" magi_status magi_tile_plan_device(const int32_t* q_ranges, const int32_t* k_ranges, const int32_t* types,
                                             int32_t num_slices, int32_t total_q, int32_t total_k, int32_t tile_tokens,
                                             int32_t num_groups, int32_t* plan, int64_t plan_words, void* stream) {
  using namespace magi::tile;
  PlanParams p{};
  p.q_ranges = reinterpret_cast<const int2*>(q_ranges);
  p.k_ranges = reinterpret_cast<const int2*>(k_ranges);
  p.types = types;
  p.num_slices = num_slices;
  p.total_q = total_q;
  p.total_k = total_k;
  p.shape = Shape{tile_tokens, num_groups};
  p.plan = plan;
  const int64_t num_tiles = tile_tokens > 0 ? (static_cast<int64_t>(total_q) + tile_tokens - 1) / tile_tokens : 0;
  const int64_t order = kHeaderWords + kTileWords * num_tiles;
  const int64_t records = order + (num_tiles + 3) / 4 * 4;
  MAGI_RETURN(check_arguments(p, plan_words, records));
  const int64_t room = (plan_words < kInt32Max ? plan_words : kInt32Max) - records;
  p.num_tiles = static_cast<int32_t>(num_tiles);
  p.words_order = static_cast<int32_t>(order);
  p.words_records = static_cast<int32_t>(records);
  p.capacity = static_cast<int32_t>(room / layer_words(tile_tokens));
  p.max_ranges = 2;
  while (p.max_ranges < num_slices && p.max_ranges < kMaxRanges) p.max_ranges *= 2;
  return launch_plan(p, static_cast<cudaStream_t>(stream));
}
