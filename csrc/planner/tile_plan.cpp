// SPDX-License-Identifier: Apache-2.0
// Host producer of the forward's tile plan, and the error sentence of the C ABI.

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <vector>

#include "planner/status.h"
#include "planner/tile_core.h"

namespace magi {

namespace {
thread_local char last_error[512] = "";
}

magi_status vfail(magi_status status, const char* format, va_list arguments) {
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  return status;
}

magi_status fail(magi_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfail(status, format, arguments);
  va_end(arguments);
  return status;
}

namespace {

using namespace tile;

// Key ranges that some query sees: sorted, disjoint, not abutting.
struct SeenKeys {
  std::vector<int32_t> lo, hi;

  int32_t size() const { return int32_t(lo.size()); }
};

// Records of the tile under construction; grows on demand, contents survive.
class HostPool {
 public:
  explicit HostPool(size_t words) : words_(words) {}

  int32_t* record(int32_t index) {
    const size_t begin = size_t(index) * words_;
    if (begin + words_ > memory_.size())
      memory_.resize(std::max(begin + words_, 2 * memory_.size()));
    return memory_.data() + begin;
  }

 private:
  size_t words_;
  std::vector<int32_t> memory_;
};

struct Job {
  Shape shape;
  int32_t total_q, total_k, num_tiles;
  std::vector<Slice> slices;  // trimmed; index = id
  SeenKeys seen;
};

magi_status check_shape(int32_t total_q, int32_t total_k, int32_t tile_tokens, int32_t num_groups) {
  if (total_q < 0 || total_k < 0) {
    return fail(MAGI_INVALID_ARGUMENT,
                "total_q is %d and total_k is %d; token counts must not be negative.", total_q,
                total_k);
  }
  if (tile_tokens < 1 || tile_tokens > kMaxTileTokens) {
    return fail(MAGI_INVALID_ARGUMENT, "tile_tokens is %d; it must be 1 to %d.", tile_tokens,
                kMaxTileTokens);
  }
  if (num_groups < 1 || num_groups > kMaxGroups) {
    return fail(MAGI_INVALID_ARGUMENT, "num_groups is %d; it must be 1 to %d.", num_groups,
                kMaxGroups);
  }
  return MAGI_OK;
}

magi_status read_slices(const int32_t* rows, int64_t num_slices, Job& job) {
  if (num_slices < 0 || num_slices > kInt32Max) {
    return fail(MAGI_INVALID_ARGUMENT, "num_slices is %lld; it must be 0 to 2^31 - 1.",
                (long long)num_slices);
  }
  if (num_slices > 0 && rows == nullptr) {
    return fail(MAGI_INVALID_ARGUMENT, "slices is NULL; give num_slices rows of 5 int32.");
  }
  job.slices.reserve(size_t(num_slices));
  for (int64_t i = 0; i < num_slices; ++i) {
    const int32_t* row = rows + 5 * i;
    Slice s{row[0], row[1], row[2], row[3], row[4]};
    if (s.q0 < 0 || s.q0 > s.q1 || s.q1 > job.total_q) {
      return fail(
          MAGI_INVALID_ARGUMENT,
          "Slice %lld has the query range [%d, %d); ranges need 0 <= start <= end <= total_q = %d.",
          (long long)i, s.q0, s.q1, job.total_q);
    }
    if (s.k0 < 0 || s.k0 > s.k1 || s.k1 > job.total_k) {
      return fail(
          MAGI_INVALID_ARGUMENT,
          "Slice %lld has the key range [%d, %d); ranges need 0 <= start <= end <= total_k = %d.",
          (long long)i, s.k0, s.k1, job.total_k);
    }
    if (s.type < 0 || s.type > 3) {
      return fail(MAGI_INVALID_ARGUMENT,
                  "Slice %lld has the mask type %d; use 0 (full), 1 (causal), 2 (inverse causal) "
                  "or 3 (both).",
                  (long long)i, s.type);
    }
    if (trim_slice(s)) job.slices.push_back(s);
  }
  return MAGI_OK;
}

SeenKeys seen_keys(const std::vector<Slice>& slices) {
  std::vector<std::pair<int32_t, int32_t>> ranges;
  ranges.reserve(slices.size());
  for (const Slice& s : slices) ranges.emplace_back(s.k0, s.k1);
  std::sort(ranges.begin(), ranges.end());
  SeenKeys seen;
  for (const auto& [lo, hi] : ranges) {
    if (seen.lo.empty() || lo > seen.hi.back()) {
      seen.lo.push_back(lo);
      seen.hi.push_back(hi);
    } else {
      seen.hi.back() = std::max(seen.hi.back(), hi);
    }
  }
  return seen;
}

// Calls use(tile, keys, num_keys) for every tile in order, keys sorted. Slices enter a sweep over
// the query axis by their first token, so that a tile only meets the slices that touch it.
template <class Use>
void for_each_tile(const Job& job, Use&& use) {
  std::vector<int32_t> entry(job.slices.size());
  for (size_t i = 0; i < entry.size(); ++i) entry[i] = int32_t(i);
  std::stable_sort(entry.begin(), entry.end(), [&](int32_t a, int32_t b) {
    return job.slices[size_t(a)].q0 < job.slices[size_t(b)].q0;
  });
  std::vector<SliceKey> active;
  size_t next = 0;
  for (int32_t t = 0; t < job.num_tiles; ++t) {
    const int32_t token0 = t * job.shape.tile_tokens;
    const int32_t end = token0 + std::min(job.shape.tile_tokens, job.total_q - token0);
    size_t kept = 0;
    for (const SliceKey& key : active) {
      const Slice& s = job.slices[size_t(key.id)];
      if (s.q1 > token0) active[kept++] = slice_key(s, key.id, token0);
    }
    active.resize(kept);
    for (; next < entry.size() && job.slices[size_t(entry[next])].q0 < end; ++next) {
      active.push_back(slice_key(job.slices[size_t(entry[next])], entry[next], token0));
    }
    std::sort(active.begin(), active.end());
    use(t, active.data(), int32_t(active.size()));
  }
}

// Tile ids by decreasing cost, ties by id: a stable radix sort on the distance to the largest cost.
void sort_by_cost(const magi_tile_desc* tiles, int32_t num_tiles, int32_t* order) {
  constexpr int kBits = 11;
  constexpr uint32_t kBins = 1u << kBits;
  int32_t largest = 0, smallest = kInt32Max;
  for (int32_t t = 0; t < num_tiles; ++t) {
    largest = std::max(largest, tiles[t].cost);
    smallest = std::min(smallest, tiles[t].cost);
    order[t] = t;
  }
  if (num_tiles == 0) return;
  const uint32_t span = uint32_t(largest - smallest);
  std::vector<int32_t> from(static_cast<size_t>(num_tiles));
  for (int shift = 0; shift < 32 && (span >> shift) != 0; shift += kBits) {
    std::copy(order, order + num_tiles, from.begin());
    const auto bin = [&](int32_t t) {
      return (uint32_t(largest - tiles[t].cost) >> shift) % kBins;
    };
    int32_t place[kBins + 1] = {};
    for (int32_t t = 0; t < num_tiles; ++t) ++place[bin(t) + 1];
    for (uint32_t b = 0; b < kBins; ++b) place[b + 1] += place[b];
    for (const int32_t t : from) order[place[bin(t)]++] = t;
  }
}

// Parts of the caller's buffer; the places of header, tiles and order do not depend on the number
// of segments.
struct L2Groups {
  magi_tile_plan_header* header = nullptr;
  magi_tile_desc* tiles = nullptr;
  int32_t* order = nullptr;
  int32_t* records = nullptr;
  int64_t capacity = 0;  // records that fit
};

L2Groups l2_groups_of(const Job& job, int32_t* plan, int64_t plan_words) {
  L2Groups out;
  const int64_t fixed = records_at(job.num_tiles);
  if (plan == nullptr || plan_words < fixed) return out;
  out.header = reinterpret_cast<magi_tile_plan_header*>(plan);
  out.tiles = reinterpret_cast<magi_tile_desc*>(plan + kHeaderWords);
  out.order = plan + order_at(job.num_tiles);
  out.records = plan + fixed;
  out.capacity = (plan_words - fixed) / segment_words(job.shape.tile_tokens);
  return out;
}

// Plans all tiles; writes what fits and returns the number of segments there are.
int64_t plan_tiles(const Job& job, const L2Groups& out,
                   int64_t (&num_key_blocks)[MAGI_KEY_BLOCK_SIZES]) {
  const size_t record_words = size_t(segment_words(job.shape.tile_tokens));
  const SerialTeam team;
  HostPool pool(record_words);
  int64_t num_segments = 0;
  for_each_tile(job, [&](int32_t t, const SliceKey* keys, int32_t num_keys) {
    const int32_t token0 = t * job.shape.tile_tokens;
    const int32_t num_tokens = std::min(job.shape.tile_tokens, job.total_q - token0);
    const TileResult result =
        plan_tile(team, pool, job.shape, token0, num_tokens, job.slices.data(), keys, num_keys,
                  job.seen.lo.data(), job.seen.hi.data(), job.seen.size(), job.total_k);
    if (out.tiles != nullptr && num_segments + result.num_segments <= out.capacity) {
      out.tiles[t] = magi_tile_desc{token0,
                                    num_tokens,
                                    int32_t(num_segments),
                                    result.num_segments,
                                    to_int32(result.sums.cost),
                                    to_int32(result.sums.num_blocks),
                                    {0, 0}};
      if (result.num_segments > 0) {
        memcpy(out.records + size_t(num_segments) * record_words, pool.record(0),
               size_t(result.num_segments) * record_words * sizeof(int32_t));
      }
    }
    num_segments += result.num_segments;
    for (int32_t i = 0; i < MAGI_KEY_BLOCK_SIZES; ++i)
      num_key_blocks[i] += result.sums.num_key_blocks[i];
  });
  return num_segments;
}

void write_header(const Job& job, int64_t num_segments, int64_t words,
                  magi_tile_plan_header* header) {
  *header = magi_tile_plan_header{};
  describe_plan(*header, job.shape, job.total_q, job.total_k, job.num_tiles);
  header->num_segments = int32_t(num_segments);
  header->words_total = int32_t(words);
  header->has_unseen = !all_seen(job.seen.lo.data(), job.seen.hi.data(), job.seen.size(), 0,
                                 job.total_k, job.total_k);
}

magi_status plan_host(const int32_t* rows, int64_t num_slices, Job& job, int32_t* plan,
                      int64_t plan_words, int64_t* words_needed) {
  const int64_t least = records_at(job.num_tiles);
  if (least > kInt32Max) {
    return fail(MAGI_UNSUPPORTED,
                "%d tiles need %lld words; at most 2^31 - 1 are possible. Use larger tiles.",
                job.num_tiles, (long long)least);
  }
  const magi_status read = read_slices(rows, num_slices, job);
  if (read != MAGI_OK) return read;
  job.seen = seen_keys(job.slices);
  const L2Groups out = l2_groups_of(job, plan, plan_words);
  int64_t num_key_blocks[MAGI_KEY_BLOCK_SIZES] = {};
  const int64_t num_segments = plan_tiles(job, out, num_key_blocks);
  const int64_t words = magi_tile_plan_words(job.total_q, job.shape.tile_tokens, num_segments);
  if (words_needed != nullptr) *words_needed = words;
  if (words > kInt32Max) {
    return fail(
        MAGI_UNSUPPORTED,
        "The tile plan has %lld segments and needs %lld words; at most 2^31 - 1 are possible.",
        (long long)num_segments, (long long)words);
  }
  if (plan == nullptr) return MAGI_OK;
  if (plan_words < words) {
    return fail(MAGI_CAPACITY,
                "The tile plan needs %lld words, the buffer has %lld; allocate words_needed words.",
                (long long)words, (long long)plan_words);
  }
  sort_by_cost(out.tiles, job.num_tiles, out.order);
  for (int32_t i = job.num_tiles; i % 4 != 0; ++i) out.order[i] = 0;
  write_header(job, num_segments, words, out.header);
  std::copy(std::begin(num_key_blocks), std::end(num_key_blocks), out.header->num_key_blocks);
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

using magi::fail;

extern "C" {

const char* magi_last_error(void) { return magi::last_error; }

int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }

int64_t magi_tile_plan_words(int32_t total_q, int32_t tile_tokens, int64_t num_segments) {
  if (total_q < 0 || tile_tokens < 1 || tile_tokens > magi::tile::kMaxTileTokens ||
      num_segments < 0) {
    fail(MAGI_INVALID_ARGUMENT,
         "total_q is %d, tile_tokens %d, num_segments %lld; none may be negative, and tile_tokens "
         "must be 1 to %d.",
         total_q, tile_tokens, (long long)num_segments, magi::tile::kMaxTileTokens);
    return -1;
  }
  const int32_t num_tiles = int32_t((int64_t(total_q) + tile_tokens - 1) / tile_tokens);
  return magi::tile::records_at(num_tiles) + num_segments * magi::tile::segment_words(tile_tokens);
}

magi_status magi_tile_plan_host(const int32_t* slices, int64_t num_slices, int32_t total_q,
                                int32_t total_k, int32_t tile_tokens, int32_t num_groups,
                                int32_t* plan, int64_t plan_words, int64_t* words_needed) {
  const magi_status shape = magi::check_shape(total_q, total_k, tile_tokens, num_groups);
  if (shape != MAGI_OK) return shape;
  if (plan == nullptr && words_needed == nullptr) {
    return fail(MAGI_INVALID_ARGUMENT,
                "plan and words_needed are both NULL; give at least one of them.");
  }
  try {
    magi::Job job{};
    job.shape = {tile_tokens, num_groups};
    job.total_q = total_q;
    job.total_k = total_k;
    job.num_tiles = int32_t((int64_t(total_q) + tile_tokens - 1) / tile_tokens);
    return magi::plan_host(slices, num_slices, job, plan, plan_words, words_needed);
  } catch (const std::exception& error) {
    return fail(MAGI_CAPACITY, "No host memory for the tile plan of %lld slices: %s.",
                (long long)num_slices, error.what());
  }
}

}  // extern "C"
