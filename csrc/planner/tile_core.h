// SPDX-License-Identifier: Apache-2.0
// The tile plan of one tile: from its AttnSlices to segments. Host and device producer share this
// header, so that both give the same plan.
//
// Row r of a slice [q0, q1) x [k0, k1) sees keys [lo, hi) with lo = k0 (+ 1 per row if inverse) and
// hi = k1 (- 1 per row below the last if causal). Both bounds never decrease, so rows [a, b) visit
// [lo(a), hi(b - 1)) and every one of them sees [lo(b - 1), hi(a)).
//
// Loops over rows are strided by a team: SerialTeam on the host, a warp on the device. A team has
// rank(), size(), sync() and the reductions any(bool), min(int32_t), max(int32_t), whose results
// all members get.
#ifndef MAGI_PLANNER_TILE_CORE_H
#define MAGI_PLANNER_TILE_CORE_H

#include <stdint.h>

#include "magi/abi.h"

#if defined(__CUDACC__)
#define MAGI_HD __host__ __device__
#else
#define MAGI_HD
#endif

namespace magi {
namespace tile {

constexpr int32_t kKeyBlock = 128;  // keys per block; blocks are laid from visit_hi downwards
constexpr int32_t kMaxGroups = 3;
constexpr int32_t kOpenSegments = 8;  // segments a slice may still combine: the newest ones
constexpr int32_t kPlainCost = 16;    // one group, one block without masking
constexpr int32_t kMaskedCost = 19;   // with masking
constexpr int32_t kTileCost = 12;     // load of Q, epilogue
// What opening a segment is taken to cost each group when it competes with joining one: new row
// intervals and a pipeline that drains. Not part of a tile's cost.
constexpr int32_t kSegmentStartCost = 16;
constexpr int32_t kCausal = 1, kInverse = 2;  // bits of the slice type
constexpr int32_t kSegmentHeaderWords = 32;
constexpr int32_t kTileWords = 8;
constexpr int32_t kHeaderWords = 28;
constexpr int32_t kMaxTileTokens = 1024;
constexpr int32_t kInt32Max = 0x7fffffff;

static_assert(sizeof(magi_tile_plan_header) == 4 * kHeaderWords, "the header is 28 words");
static_assert(sizeof(magi_tile_desc) == 4 * kTileWords, "a tile is 8 words");
static_assert(sizeof(magi_tile_segment) == 4 * kSegmentHeaderWords, "a segment header is 32 words");

struct Shape {
  int32_t tile_tokens;
  int32_t num_groups;
};

struct Slice {
  int32_t q0, q1, k0, k1, type;
};

// The rows of one slice inside one tile; rows count from the tile's first token.
struct Piece {
  int32_t row0, row1;
  int32_t lo0, hi0;  // bounds of row0
  int32_t slope_lo, slope_hi;

  MAGI_HD int32_t lo(int32_t row) const { return lo0 + slope_lo * (row - row0); }
  MAGI_HD int32_t hi(int32_t row) const { return hi0 + slope_hi * (row - row0); }
};

// As in magi_tile_segment. Empty ranges are (0, 0).
struct GroupRange {
  int32_t visit_lo, visit_hi, full_lo, full_hi;
};

// Entry i of num_key_blocks counts blocks of so many keys.
MAGI_HD constexpr int32_t key_block_size(int32_t i) { return 64 + 16 * i; }

MAGI_HD inline int32_t to_int32(int64_t value) {
  return int32_t(value < kInt32Max ? value : kInt32Max);
}

// What the segments of a tile add up to.
struct SegmentSums {
  int64_t cost = kTileCost, num_blocks = 0;
  int64_t num_key_blocks[MAGI_KEY_BLOCK_SIZES] = {};
};

struct TileResult {
  int32_t num_segments;
  SegmentSums sums;
};

struct SerialTeam {
  int32_t rank() const { return 0; }
  int32_t size() const { return 1; }
  void sync() const {}
  bool any(bool value) const { return value; }
  int32_t min(int32_t value) const { return value; }
  int32_t max(int32_t value) const { return value; }
};

MAGI_HD inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
MAGI_HD inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

MAGI_HD inline int32_t segment_words(int32_t tile_tokens) {
  return (kSegmentHeaderWords + 2 * tile_tokens + 3) / 4 * 4;
}

// Where the parts of a plan lie, in words; 64 bits, because callers check that a plan fits.
MAGI_HD inline int64_t order_at(int64_t num_tiles) { return kHeaderWords + kTileWords * num_tiles; }
MAGI_HD inline int64_t records_at(int64_t num_tiles) {
  return order_at(num_tiles) + (num_tiles + 3) / 4 * 4;
}

// The fields of a header that follow from the sizes; the producers fill in segments, status and
// has_unseen.
MAGI_HD inline void describe_plan(magi_tile_plan_header& header, Shape shape, int32_t total_q,
                                  int32_t total_k, int32_t num_tiles) {
  header.version = MAGI_ABI_VERSION;
  header.total_q = total_q;
  header.total_k = total_k;
  header.tile_tokens = shape.tile_tokens;
  header.num_groups = shape.num_groups;
  header.num_tiles = num_tiles;
  header.segment_words = segment_words(shape.tile_tokens);
  header.words_tiles = kHeaderWords;
  header.words_order = int32_t(order_at(num_tiles));
  header.words_records = int32_t(records_at(num_tiles));
  header.words_first_order = header.words_work_tiles = 0;
}

// First row of group g, for g in [0, num_groups].
MAGI_HD inline int32_t group_row(Shape shape, int32_t g) {
  return g * shape.tile_tokens / shape.num_groups;
}

// Drops the rows that see nothing; false if none is left. Afterwards every row sees at least one
// key, and every key of [k0, k1) is seen by some row.
MAGI_HD inline bool trim_slice(Slice& s) {
  if (s.q1 <= s.q0 || s.k1 <= s.k0) return false;
  const int32_t excess = (s.q1 - s.q0) - (s.k1 - s.k0);
  if (excess <= 0 || s.type == 0) return true;
  if (s.type == (kCausal | kInverse)) return false;
  if (s.type == kCausal) s.q0 += excess;
  if (s.type == kInverse) s.q1 -= excess;
  return true;
}

// The transposed slice: rows are its keys, columns its queries. Bounds that move with the key do so
// only where a query begins or ends to see it, so up to three slices are needed, with the rows in
// order. Returns how many.
MAGI_HD inline int32_t transpose_slice(Slice s, Slice out[3]) {
  if (!trim_slice(s)) return 0;
  const int32_t queries = s.q1 - s.q0;
  // Key k is seen from query q1 - (k1 - k) on if causal, and up to query q0 + (k - k0) if inverse,
  // both clipped to the slice. A lower bound that rises with the row is the inverse type, an upper
  // one the causal type.
  const int32_t rises_from =
      s.type & kCausal ? s.k1 - queries : s.k1;  // keys from here on: the lower bound rises
  const int32_t rises_to =
      s.type & kInverse ? s.k0 + queries : s.k0;  // keys up to here: the upper bound rises
  const int32_t cut0 = min_of(rises_from, rises_to), cut1 = max_of(rises_from, rises_to);
  int32_t count = 0;
  if (s.k0 < cut0) out[count++] = Slice{s.k0, cut0, s.q0, s.q0 + (cut0 - s.k0), kCausal};
  if (cut0 < cut1) {
    const bool both_rise = rises_from < rises_to;
    out[count++] = both_rise ? Slice{cut0, cut1, s.q0, s.q1, kCausal | kInverse}
                             : Slice{cut0, cut1, s.q0, s.q1, 0};
  }
  if (cut1 < s.k1) out[count++] = Slice{cut1, s.k1, s.q1 - (s.k1 - cut1), s.q1, kInverse};
  return count;
}

// Interval of query token q of a trimmed slice.
MAGI_HD inline int32_t slice_lo(const Slice& s, int32_t q) {
  return s.type & kInverse ? s.k0 + (q - s.q0) : s.k0;
}
MAGI_HD inline int32_t slice_hi(const Slice& s, int32_t q) {
  return s.type & kCausal ? s.k1 - (s.q1 - 1 - q) : s.k1;
}

// The part of a trimmed slice in the tile at token0; the two must share a token.
MAGI_HD inline Piece make_piece(const Slice& s, int32_t token0, int32_t num_tokens) {
  Piece p;
  const int32_t first = max_of(s.q0, token0);
  p.row0 = first - token0;
  p.row1 = min_of(s.q1 - token0, num_tokens);
  p.lo0 = slice_lo(s, first);
  p.hi0 = slice_hi(s, first);
  p.slope_lo = (s.type & kInverse) ? 1 : 0;
  p.slope_hi = (s.type & kCausal) ? 1 : 0;
  return p;
}

// Order in which a tile takes its slices: by first key in the tile, then first query, then id.
struct SliceKey {
  int32_t lo, q0, id;
};

MAGI_HD inline SliceKey slice_key(const Slice& s, int32_t id, int32_t token0) {
  return SliceKey{slice_lo(s, max_of(s.q0, token0)), s.q0, id};
}

MAGI_HD inline bool operator<(const SliceKey& a, const SliceKey& b) {
  if (a.lo != b.lo) return a.lo < b.lo;
  if (a.q0 != b.q0) return a.q0 < b.q0;
  return a.id < b.id;
}

// Group ranges of a segment that holds nothing but the piece.
MAGI_HD inline GroupRange piece_range(const Piece& p, int32_t row_begin, int32_t row_end) {
  const int32_t a = max_of(p.row0, row_begin), b = min_of(p.row1, row_end);
  if (a >= b) return GroupRange{0, 0, 0, 0};
  GroupRange range{p.lo(a), p.hi(b - 1), p.lo(b - 1), p.hi(a)};
  if (a != row_begin || b != row_end || range.full_lo >= range.full_hi)
    range.full_lo = range.full_hi = 0;
  return range;
}

// Range of the existing rows [row_begin, row_end) of a group after the piece has combined the
// segment. Where both have a row their intervals abut, so the smaller lo and the larger hi bound
// their union.
template <class Team>
MAGI_HD GroupRange joined_range(const Team& team, const int32_t* rows, const Piece& p,
                                int32_t row_begin, int32_t row_end) {
  int32_t visit_lo = kInt32Max, visit_hi = 0, full_lo = 0, full_hi = kInt32Max;
  for (int32_t r = row_begin + team.rank(); r < row_end; r += team.size()) {
    int32_t lo = rows[2 * r], hi = rows[2 * r + 1];
    if (r >= p.row0 && r < p.row1) {
      const bool has = lo < hi;
      lo = has ? min_of(lo, p.lo(r)) : p.lo(r);
      hi = has ? max_of(hi, p.hi(r)) : p.hi(r);
    }
    if (lo < hi) {
      visit_lo = min_of(visit_lo, lo);
      visit_hi = max_of(visit_hi, hi);
      full_lo = max_of(full_lo, lo);
      full_hi = min_of(full_hi, hi);
    } else {
      full_lo = kInt32Max;  // a row that sees nothing leaves no key that all rows see
    }
  }
  GroupRange range{team.min(visit_lo), team.max(visit_hi), team.max(full_lo), team.min(full_hi)};
  if (range.visit_lo >= range.visit_hi) return GroupRange{0, 0, 0, 0};
  if (range.full_lo >= range.full_hi) range.full_lo = range.full_hi = 0;
  return range;
}

// Whether every row keeps a single interval when the piece combines: rows are new to the segment,
// or abut left or right.
template <class Team>
MAGI_HD bool can_join(const Team& team, const int32_t* rows, const Piece& p) {
  for (int32_t first = p.row0; first < p.row1; first += team.size()) {
    const int32_t r = first + team.rank();
    bool clash = false;
    if (r < p.row1) {
      const int32_t lo = rows[2 * r], hi = rows[2 * r + 1];
      clash = lo < hi && hi != p.lo(r) && lo != p.hi(r);
    }
    if (team.any(clash)) return false;
  }
  return true;
}

template <class Team>
MAGI_HD void combine_rows(const Team& team, int32_t* rows, const Piece& p) {
  for (int32_t r = p.row0 + team.rank(); r < p.row1; r += team.size()) {
    const int32_t lo = rows[2 * r], hi = rows[2 * r + 1];
    const bool has = lo < hi;
    rows[2 * r] = has ? min_of(lo, p.lo(r)) : p.lo(r);
    rows[2 * r + 1] = has ? max_of(hi, p.hi(r)) : p.hi(r);
  }
  team.sync();
}

// Hull of the groups' visit ranges.
MAGI_HD inline void segment_visit(const GroupRange* groups, int32_t num_groups, int32_t& lo,
                                  int32_t& hi) {
  lo = kInt32Max;
  hi = 0;
  for (int32_t g = 0; g < num_groups; ++g) {
    if (groups[g].visit_lo >= groups[g].visit_hi) continue;
    lo = min_of(lo, groups[g].visit_lo);
    hi = max_of(hi, groups[g].visit_hi);
  }
  if (lo >= hi) lo = hi = 0;
}

MAGI_HD inline int32_t block_floor(int32_t keys) { return keys / kKeyBlock; }
// Without overflow, for sizes near 2^31.
MAGI_HD inline int32_t ceil_div(int32_t keys, int32_t block) {
  return keys / block + (keys % block != 0);
}
MAGI_HD inline int32_t block_ceil(int32_t keys) { return ceil_div(keys, kKeyBlock); }

// Cost and number of blocks of a segment. With distances counted down from visit_hi, block b holds
// [128 b, 128 (b + 1)). Each block from the first to the last takes the time of all groups, also of
// those that do not visit it, because its keys are copied and groups wait for each other.
MAGI_HD inline int64_t segment_cost(const GroupRange* groups, int32_t num_groups,
                                    int32_t& num_blocks) {
  int32_t visit_lo, visit_hi;
  segment_visit(groups, num_groups, visit_lo, visit_hi);
  num_blocks = block_ceil(visit_hi - visit_lo);
  int64_t cost = int64_t(kPlainCost) * num_groups * num_blocks;
  for (int32_t g = 0; g < num_groups; ++g) {
    const GroupRange& range = groups[g];
    if (range.visit_lo >= range.visit_hi) continue;
    const int32_t touched =
        block_ceil(visit_hi - range.visit_lo) - block_floor(visit_hi - range.visit_hi);
    int32_t plain = 0;
    if (range.full_lo < range.full_hi) {
      plain =
          max_of(0, block_floor(visit_hi - range.full_lo) - block_ceil(visit_hi - range.full_hi));
    }
    cost += int64_t(kMaskedCost - kPlainCost) * (touched - plain);
  }
  return cost;
}

// Whether [lo, hi) clipped to [0, total_k) lies in the union of `count` sorted, disjoint,
// non-abutting key ranges.
MAGI_HD inline bool all_seen(const int32_t* seen_lo, const int32_t* seen_hi, int32_t count,
                             int32_t lo, int32_t hi, int32_t total_k) {
  lo = max_of(lo, 0);
  hi = min_of(hi, total_k);
  if (lo >= hi) return true;
  int32_t first = 0, last = count;  // search for the number of ranges that start at or before lo
  while (first < last) {
    const int32_t middle = first + (last - first) / 2;
    if (seen_lo[middle] <= lo) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first > 0 && seen_hi[first - 1] >= hi;
}

// Whether blocks of a segment may touch keys that are not seen. Those of the forward begin up to
// 127 keys below visit_lo, and those of a transposed plan, which lie at multiples of their size,
// end so many above visit_hi at most.
MAGI_HD inline bool touches_unseen(const int32_t* seen_lo, const int32_t* seen_hi, int32_t count,
                                   int32_t visit_lo, int32_t visit_hi, int32_t total_k) {
  const int32_t above = total_k - visit_hi < kKeyBlock ? total_k : visit_hi + (kKeyBlock - 1);
  return !all_seen(seen_lo, seen_hi, count, visit_lo - (kKeyBlock - 1), above, total_k);
}

// A segment under construction; segment i of the tile is at i % kOpenSegments.
struct OpenSegment {
  int32_t row0, row1;  // hull of the rows it holds
  int64_t cost;
};

MAGI_HD inline magi_tile_segment* segment_head(int32_t* record) {
  return reinterpret_cast<magi_tile_segment*>(record);
}
MAGI_HD inline int32_t* segment_rows(int32_t* record) { return record + kSegmentHeaderWords; }

template <class Team>
MAGI_HD void store_groups(const Team& team, int32_t* record, const GroupRange* groups,
                          int32_t num_groups) {
  if (team.rank() == 0) {
    magi_tile_segment* head = segment_head(record);
    for (int32_t g = 0; g < num_groups; ++g) {
      head->group[g].visit_lo = groups[g].visit_lo;
      head->group[g].visit_hi = groups[g].visit_hi;
      head->group[g].full_lo = groups[g].full_lo;
      head->group[g].full_hi = groups[g].full_hi;
    }
  }
  team.sync();
}

template <class Team>
MAGI_HD void clear_record(const Team& team, int32_t* record, int32_t words) {
  for (int32_t i = team.rank(); i < words; i += team.size()) record[i] = 0;
  team.sync();
}

// Puts a piece into the open segment where it adds the least cost, or into a new segment if that is
// cheaper or the only way. Ties go to the newest segment. `pool.record(i)` is the memory of the
// tile's segment i, or NULL if there is no room. Returns false in that case.
template <class Team, class Pool>
MAGI_HD bool place_piece(const Team& team, Pool& pool, Shape shape, int32_t num_tokens,
                         const Piece& p, OpenSegment* open, int32_t& num_segments) {
  GroupRange best_groups[kMaxGroups];
  GroupRange groups[kMaxGroups];
  int32_t blocks;
  for (int32_t g = 0; g < shape.num_groups; ++g) {
    best_groups[g] =
        piece_range(p, group_row(shape, g), min_of(group_row(shape, g + 1), num_tokens));
  }
  int64_t best_cost = segment_cost(best_groups, shape.num_groups, blocks);
  int64_t best_growth = best_cost + kSegmentStartCost * shape.num_groups + 1;
  int32_t best = -1;
  for (int32_t i = num_segments - 1; i >= 0 && i >= num_segments - kOpenSegments; --i) {
    const OpenSegment& segment = open[i % kOpenSegments];
    const int32_t* rows = segment_rows(pool.record(i));
    const bool apart = p.row1 <= segment.row0 || p.row0 >= segment.row1;
    if (!apart && !can_join(team, rows, p)) continue;
    for (int32_t g = 0; g < shape.num_groups; ++g) {
      groups[g] = joined_range(team, rows, p, group_row(shape, g),
                               min_of(group_row(shape, g + 1), num_tokens));
    }
    const int64_t cost = segment_cost(groups, shape.num_groups, blocks);
    if (cost - segment.cost >= best_growth) continue;
    best = i;
    best_cost = cost;
    best_growth = cost - segment.cost;
    for (int32_t g = 0; g < shape.num_groups; ++g) best_groups[g] = groups[g];
  }
  if (best < 0) {
    best = num_segments;
    int32_t* record = pool.record(best);
    if (record == nullptr) return false;
    ++num_segments;
    clear_record(team, record, segment_words(shape.tile_tokens));
    open[best % kOpenSegments] = OpenSegment{p.row0, p.row1, best_cost};
  } else {
    OpenSegment& segment = open[best % kOpenSegments];
    segment.row0 = min_of(segment.row0, p.row0);
    segment.row1 = max_of(segment.row1, p.row1);
    segment.cost = best_cost;
  }
  int32_t* record = pool.record(best);
  combine_rows(team, segment_rows(record), p);
  store_groups(team, record, best_groups, shape.num_groups);
  return true;
}

// Visit range, has_unseen and the fields of a single key space; adds to the sums.
template <class Team>
MAGI_HD void finish_segment(const Team& team, int32_t* record, Shape shape, const int32_t* seen_lo,
                            const int32_t* seen_hi, int32_t num_seen, int32_t total_k,
                            SegmentSums& sums) {
  magi_tile_segment* head = segment_head(record);
  GroupRange groups[kMaxGroups];
  for (int32_t g = 0; g < shape.num_groups; ++g) {
    groups[g] = GroupRange{head->group[g].visit_lo, head->group[g].visit_hi, head->group[g].full_lo,
                           head->group[g].full_hi};
  }
  int32_t num_blocks, visit_lo, visit_hi;
  sums.cost += segment_cost(groups, shape.num_groups, num_blocks);
  sums.num_blocks += num_blocks;
  segment_visit(groups, shape.num_groups, visit_lo, visit_hi);
  for (int32_t i = 0; i < MAGI_KEY_BLOCK_SIZES; ++i)
    sums.num_key_blocks[i] += ceil_div(visit_hi - visit_lo, key_block_size(i));
  if (team.rank() == 0) {
    head->visit_lo = visit_lo;
    head->visit_hi = visit_hi;
    head->source = 0;
    head->arrival = -1;
    head->has_unseen = touches_unseen(seen_lo, seen_hi, num_seen, visit_lo, visit_hi, total_k);
  }
  team.sync();
}

// Segments of one tile from its trimmed slices, sorted by SliceKey. num_segments is -1 if the pool
// ran out.
template <class Team, class Pool>
MAGI_HD TileResult plan_tile(const Team& team, Pool& pool, Shape shape, int32_t token0,
                             int32_t num_tokens, const Slice* slices, const SliceKey* keys,
                             int32_t num_keys, const int32_t* seen_lo, const int32_t* seen_hi,
                             int32_t num_seen, int32_t total_k) {
  OpenSegment open[kOpenSegments];
  int32_t num_segments = 0;
  for (int32_t i = 0; i < num_keys; ++i) {
    const Piece p = make_piece(slices[keys[i].id], token0, num_tokens);
    if (!place_piece(team, pool, shape, num_tokens, p, open, num_segments))
      return TileResult{-1, {}};
  }
  SegmentSums sums;
  for (int32_t i = 0; i < num_segments; ++i) {
    finish_segment(team, pool.record(i), shape, seen_lo, seen_hi, num_seen, total_k, sums);
  }
  return TileResult{num_segments, sums};
}

}  // namespace tile
}  // namespace magi

#endif  // MAGI_PLANNER_TILE_CORE_H
