// SPDX-License-Identifier: Apache-2.0
// Checks a tile plan against the slices it was made from. Written from the definitions alone: it
// shares no code with the producers, so that one cannot hide the other's mistake.
//
// Every row is checked as a set of intervals: those of its segments against those of its slices.
// Costs and ranges follow from the rows' intervals. Nothing is per pair, so a plan of a million
// tokens takes a fraction of a second.

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <exception>
#include <limits>
#include <vector>

#include "magi/abi.h"
#include "planner/status.h"

namespace magi {
namespace {

constexpr int64_t kBlock = 128;

struct Interval {
  int64_t lo, hi;
  int64_t from;  // slice, or segment of the tile

  bool operator<(const Interval& other) const { return lo < other.lo; }
};

// What query row q of a slice may see; lo >= hi for nothing.
Interval row_interval(const int32_t* slice, int64_t id, int64_t q) {
  const int64_t q0 = slice[0], q1 = slice[1], k0 = slice[2], k1 = slice[3];
  const bool causal = slice[4] & 1, inverse = slice[4] & 2;
  Interval out{k0, k1, id};
  if (inverse) out.lo = k0 + (q - q0);
  if (causal) out.hi = k1 - (q1 - 1 - q);
  return out;
}

// Numbers x in [first, last] with x = anchor - 128 b for some integer b.
int64_t count_steps(int64_t first, int64_t last, int64_t anchor) {
  if (first > last) return 0;
  const int64_t top =
      last - (((last - anchor) % kBlock) + kBlock) % kBlock;  // largest such x <= last
  return top < first ? 0 : (top - first) / kBlock + 1;
}

__attribute__((format(printf, 1, 2))) magi_status fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const magi_status status = vfail(MAGI_INVALID_ARGUMENT, format, arguments);
  va_end(arguments);
  return status;
}

class Walker {
 public:
  Walker(const int32_t* slices, int64_t num_slices, const int32_t* plan, int64_t plan_words)
      : slices_(slices), num_slices_(num_slices), plan_(plan), plan_words_(plan_words) {}

  magi_status run() {
    for (auto step : {&Walker::check_header, &Walker::check_slices, &Walker::check_unseen,
                      &Walker::check_records, &Walker::check_order, &Walker::check_tiles,
                      &Walker::check_key_blocks}) {
      const magi_status status = (this->*step)();
      if (status != MAGI_OK) return status;
    }
    return MAGI_OK;
  }

 private:
  magi_status check_header();
  magi_status check_slices();
  magi_status check_unseen();
  magi_status check_records();
  magi_status check_order();
  magi_status check_tiles();
  magi_status check_tile(int64_t t);
  magi_status check_segment(int64_t t, int64_t segment);
  magi_status check_group(int64_t t, int64_t segment, int64_t g);
  magi_status check_row(int64_t t, int64_t q);
  magi_status compare_row(int64_t t, int64_t q);
  magi_status check_cost(int64_t t);
  magi_status check_key_blocks();

  // Copies, so that no field is read through a pointer of the wrong type.
  magi_tile_desc tile(int64_t t) const {
    magi_tile_desc out;
    memcpy(&out, plan_ + header_.words_tiles + t * 8, sizeof(out));
    return out;
  }
  const int32_t* record(int64_t index) const {
    return plan_ + header_.words_records + index * int64_t(header_.segment_words);
  }
  magi_tile_segment segment_of(int64_t t, int64_t segment) const {
    magi_tile_segment out;
    memcpy(&out, record(tile(t).segment_begin + segment), sizeof(out));
    return out;
  }
  const int32_t* pairs_of(int64_t t, int64_t segment) const {
    return record(tile(t).segment_begin + segment) + 32;
  }
  int64_t group_begin(int64_t g) const { return g * header_.tile_tokens / header_.num_groups; }

  const int32_t* slices_;
  int64_t num_slices_;
  const int32_t* plan_;
  int64_t plan_words_;
  magi_tile_plan_header header_{};
  std::vector<Interval> unseen_;   // gaps between seen keys, sorted
  std::vector<int64_t> by_start_;  // slice ids by first query
  std::vector<int64_t> active_;    // slices that hold the current query
  size_t next_ = 0;                // in by_start_
  std::vector<Interval> wanted_, found_;
};

magi_status Walker::check_header() {
  if (plan_ == nullptr) return fault("plan is NULL; give the buffer that holds the plan.");
  if (plan_words_ < 28)
    return fault("plan_words is %lld; a plan has at least 28 words.", (long long)plan_words_);
  memcpy(&header_, plan_, sizeof(header_));
  const magi_tile_plan_header& h = header_;
  if (h.version != MAGI_ABI_VERSION) {
    return fault("The plan has version %d, this library %d; build both from the same source.",
                 h.version, MAGI_ABI_VERSION);
  }
  if (h.status != 0)
    return fault("The plan's status is %d; it is incomplete, its buffer was too small.", h.status);
  if (h.total_q < 0 || h.total_k < 0 || h.tile_tokens < 1 || h.num_groups < 1 || h.num_groups > 3) {
    return fault(
        "The header's total_q %d, total_k %d, tile_tokens %d or num_groups %d is out of range.",
        h.total_q, h.total_k, h.tile_tokens, h.num_groups);
  }
  const int64_t tiles = (int64_t(h.total_q) + h.tile_tokens - 1) / h.tile_tokens;
  if (h.num_tiles != tiles) {
    return fault("The header has num_tiles %d; %d tokens in tiles of %d make %lld.", h.num_tiles,
                 h.total_q, h.tile_tokens, (long long)tiles);
  }
  int64_t words = 32 + 2 * int64_t(h.tile_tokens);
  while (words % 4 != 0) ++words;
  if (h.segment_words != words) {
    return fault("The header has segment_words %d; tiles of %d tokens need %lld.", h.segment_words,
                 h.tile_tokens, (long long)words);
  }
  if (h.words_tiles % 4 != 0 || h.words_order % 4 != 0 || h.words_records % 4 != 0 ||
      h.words_tiles < 28 || h.words_order < h.words_tiles + 8 * tiles ||
      h.words_records < h.words_order + tiles) {
    return fault(
        "The header's l2_groups start at words %d (tiles), %d (order), %d (records); they must be "
        "aligned to 4 "
        "words and must not overlap.",
        h.words_tiles, h.words_order, h.words_records);
  }
  if (h.num_segments < 0 || h.words_total < h.words_records + h.num_segments * words ||
      h.words_total > plan_words_) {
    return fault(
        "The header has words_total %d for %d segments in a buffer of %lld words; the segments do "
        "not fit.",
        h.words_total, h.num_segments, (long long)plan_words_);
  }
  if (h.words_first_order != 0 || h.words_work_tiles != 0 || h.reserved[0] != 0 ||
      h.reserved[1] != 0)
    return fault("words_first_order, words_work_tiles or reserved words of the header are not 0.");
  return MAGI_OK;
}

magi_status Walker::check_slices() {
  if (num_slices_ < 0 || (num_slices_ > 0 && slices_ == nullptr)) {
    return fault("num_slices is %lld and slices is %s; give num_slices rows of 5 int32.",
                 (long long)num_slices_, slices_ == nullptr ? "NULL" : "not NULL");
  }
  for (int64_t i = 0; i < num_slices_; ++i) {
    const int32_t* s = slices_ + 5 * i;
    if (s[0] < 0 || s[0] > s[1] || s[1] > header_.total_q || s[2] < 0 || s[2] > s[3] ||
        s[3] > header_.total_k || s[4] < 0 || s[4] > 3) {
      return fault(
          "Slice %lld is q [%d, %d) k [%d, %d) type %d; it does not fit a plan of %d queries and "
          "%d keys.",
          (long long)i, s[0], s[1], s[2], s[3], s[4], header_.total_q, header_.total_k);
    }
    if (s[0] < s[1] && s[2] < s[3]) by_start_.push_back(i);
  }
  std::sort(by_start_.begin(), by_start_.end(),
            [&](int64_t a, int64_t b) { return slices_[5 * a] < slices_[5 * b]; });
  return MAGI_OK;
}

// Lengths of a slice's row intervals change by the same -1, 0 or 1 from row to row, so the rows
// that see something are one run; neighbours in it touch, so what they see together is one
// interval.
magi_status Walker::check_unseen() {
  std::vector<Interval> seen;
  for (const int64_t id : by_start_) {
    const int32_t* s = slices_ + 5 * id;
    const Interval top = row_interval(s, id, s[0]), bottom = row_interval(s, id, s[1] - 1);
    const int64_t at_top = top.hi - top.lo, at_bottom = bottom.hi - bottom.lo;
    if (at_top <= 0 && at_bottom <= 0) continue;
    const int64_t first = at_top > 0 ? s[0] : s[1] - at_bottom;
    const int64_t last = at_bottom > 0 ? s[1] - 1 : s[0] + at_top - 1;
    seen.push_back({row_interval(s, id, first).lo, row_interval(s, id, last).hi, id});
  }
  std::sort(seen.begin(), seen.end());
  int64_t reached = 0;
  for (const Interval& part : seen) {
    if (part.lo > reached) unseen_.push_back({reached, part.lo, -1});
    reached = std::max(reached, part.hi);
  }
  if (reached < header_.total_k) unseen_.push_back({reached, header_.total_k, -1});
  const int32_t has_unseen = unseen_.empty() ? 0 : 1;
  if (header_.has_unseen != has_unseen) {
    if (has_unseen) {
      return fault("The header has has_unseen %d, but no query sees key %lld.", header_.has_unseen,
                   (long long)unseen_[0].lo);
    }
    return fault("The header has has_unseen %d, but every key is seen by some query.",
                 header_.has_unseen);
  }
  return MAGI_OK;
}

magi_status Walker::check_records() {
  const int64_t room = (header_.words_total - header_.words_records) / header_.segment_words;
  std::vector<bool> used(size_t(room), false);
  int64_t total = 0;
  for (int64_t t = 0; t < header_.num_tiles; ++t) {
    const magi_tile_desc desc = tile(t);
    const int64_t token0 = t * header_.tile_tokens;
    const int64_t num_tokens = std::min<int64_t>(header_.tile_tokens, header_.total_q - token0);
    if (desc.token0 != token0 || desc.num_tokens != num_tokens) {
      return fault("Tile %lld has tokens %d + %d; it must have %lld + %lld.", (long long)t,
                   desc.token0, desc.num_tokens, (long long)token0, (long long)num_tokens);
    }
    if (desc.num_segments < 0 || desc.segment_begin < 0 ||
        int64_t(desc.segment_begin) + desc.num_segments > room) {
      return fault("Tile %lld has segments %d + %d; the plan has room for %lld.", (long long)t,
                   desc.segment_begin, desc.num_segments, (long long)room);
    }
    if (desc.reserved[0] != 0 || desc.reserved[1] != 0) {
      return fault("Reserved words of tile %lld are not 0.", (long long)t);
    }
    for (int64_t i = 0; i < desc.num_segments; ++i) {
      if (used[size_t(desc.segment_begin + i)]) {
        return fault("Tile %lld uses record %lld, which another tile uses too.", (long long)t,
                     (long long)(desc.segment_begin + i));
      }
      used[size_t(desc.segment_begin + i)] = true;
    }
    total += desc.num_segments;
  }
  if (total != header_.num_segments) {
    return fault("The header has num_segments %d; the tiles have %lld in all.",
                 header_.num_segments, (long long)total);
  }
  return MAGI_OK;
}

// Neighbours in strict order make the whole list strictly ordered, hence a permutation.
magi_status Walker::check_order() {
  const int32_t* order = plan_ + header_.words_order;
  for (int64_t i = 0; i < header_.num_tiles; ++i) {
    if (order[i] < 0 || order[i] >= header_.num_tiles) {
      return fault("Place %lld of the order has tile %d; there are %d tiles.", (long long)i,
                   order[i], header_.num_tiles);
    }
    if (i == 0) continue;
    const int32_t before = tile(order[i - 1]).cost, cost = tile(order[i]).cost;
    if (before < cost || (before == cost && order[i - 1] >= order[i])) {
      return fault(
          "The order has tile %d (cost %d) before tile %d (cost %d); it must be by decreasing "
          "cost, then by "
          "id, every tile once.",
          order[i - 1], before, order[i], cost);
    }
  }
  return MAGI_OK;
}

magi_status Walker::check_tiles() {
  for (int64_t t = 0; t < header_.num_tiles; ++t) {
    const magi_status status = check_tile(t);
    if (status != MAGI_OK) return status;
  }
  return MAGI_OK;
}

magi_status Walker::check_tile(int64_t t) {
  const magi_tile_desc desc = tile(t);
  for (int64_t i = 0; i < desc.num_segments; ++i) {
    const magi_status status = check_segment(t, i);
    if (status != MAGI_OK) return status;
  }
  for (int64_t q = desc.token0; q < desc.token0 + desc.num_tokens; ++q) {
    const magi_status status = check_row(t, q);
    if (status != MAGI_OK) return status;
  }
  return check_cost(t);
}

magi_status Walker::check_segment(int64_t t, int64_t segment) {
  const magi_tile_segment head = segment_of(t, segment);
  const int32_t* pairs = pairs_of(t, segment);
  const int64_t num_tokens = tile(t).num_tokens;
  for (int64_t r = 0; r < header_.tile_tokens; ++r) {
    const int32_t lo = pairs[2 * r], hi = pairs[2 * r + 1];
    const bool empty = lo == 0 && hi == 0;
    if (empty || (r < num_tokens && lo >= 0 && lo < hi && hi <= header_.total_k)) continue;
    return fault(
        "Segment %lld of tile %lld gives token %lld the keys [%d, %d); intervals are (0, 0) or "
        "non-empty inside "
        "[0, %d), and (0, 0) for tokens that do not exist.",
        (long long)segment, (long long)t, (long long)(t * header_.tile_tokens + r), lo, hi,
        header_.total_k);
  }
  int64_t visit_lo = std::numeric_limits<int64_t>::max(), visit_hi = -1;
  for (int64_t g = 0; g < 3; ++g) {
    const magi_status status = check_group(t, segment, g);
    if (status != MAGI_OK) return status;
    if (head.group[g].visit_lo >= head.group[g].visit_hi) continue;
    visit_lo = std::min<int64_t>(visit_lo, head.group[g].visit_lo);
    visit_hi = std::max<int64_t>(visit_hi, head.group[g].visit_hi);
  }
  if (visit_hi < 0) {
    return fault("Segment %lld of tile %lld contributions no keys; leave it out.",
                 (long long)segment, (long long)t);
  }
  if (head.visit_lo != visit_lo || head.visit_hi != visit_hi) {
    return fault("Segment %lld of tile %lld contributions [%d, %d); its groups visit [%lld, %lld).",
                 (long long)segment, (long long)t, head.visit_lo, head.visit_hi,
                 (long long)visit_lo, (long long)visit_hi);
  }
  if (head.source != 0 || head.arrival != -1) {
    return fault(
        "Segment %lld of tile %lld has source %d and arrival %d; this check knows one key tensor "
        "that is there "
        "from the start (0, -1).",
        (long long)segment, (long long)t, head.source, head.arrival);
  }
  // Where blocks may begin and end, also those of a transposed plan.
  const int64_t lowest = visit_lo - (kBlock - 1), highest = visit_hi + (kBlock - 1);
  const auto gap =
      std::upper_bound(unseen_.begin(), unseen_.end(), lowest,
                       [](int64_t key, const Interval& part) { return key < part.hi; });
  const int32_t has_unseen = gap != unseen_.end() && gap->lo < highest ? 1 : 0;
  if (head.has_unseen != has_unseen) {
    return fault(
        "Segment %lld of tile %lld has has_unseen %d; it must be %d for blocks that hold keys "
        "[%lld, %lld).",
        (long long)segment, (long long)t, head.has_unseen, has_unseen,
        (long long)std::max<int64_t>(lowest, 0), (long long)highest);
  }
  for (const int32_t word : head.reserved) {
    if (word != 0)
      return fault("Reserved words of segment %lld of tile %lld are not 0.", (long long)segment,
                   (long long)t);
  }
  for (const int32_t word : head.reserved2) {
    if (word != 0)
      return fault("Reserved words of segment %lld of tile %lld are not 0.", (long long)segment,
                   (long long)t);
  }
  return MAGI_OK;
}

magi_status Walker::check_group(int64_t t, int64_t segment, int64_t g) {
  const magi_tile_segment head = segment_of(t, segment);
  const auto& group = head.group[g];
  if (g >= header_.num_groups) {
    if (group.visit_lo == 0 && group.visit_hi == 0 && group.full_lo == 0 && group.full_hi == 0)
      return MAGI_OK;
    return fault("Segment %lld of tile %lld has ranges for group %lld; there are %d groups.",
                 (long long)segment, (long long)t, (long long)g, header_.num_groups);
  }
  if (group.visit_lo < 0 || group.visit_lo > group.visit_hi || group.visit_hi > header_.total_k) {
    return fault(
        "Group %lld of segment %lld of tile %lld contributions [%d, %d); ranges lie in [0, %d].",
        (long long)g, (long long)segment, (long long)t, group.visit_lo, group.visit_hi,
        header_.total_k);
  }
  const int32_t* pairs = pairs_of(t, segment);
  const int64_t end = std::min<int64_t>(group_begin(g + 1), tile(t).num_tokens);
  for (int64_t r = group_begin(g); r < end; ++r) {
    const int32_t lo = pairs[2 * r], hi = pairs[2 * r + 1];
    const long long token = t * header_.tile_tokens + r;
    if (lo < hi && (lo < group.visit_lo || hi > group.visit_hi)) {
      return fault(
          "Token %lld sees key %d in segment %lld of tile %lld, but its group %lld only "
          "contributions [%d, %d).",
          token, lo < group.visit_lo ? lo : hi - 1, (long long)segment, (long long)t, (long long)g,
          group.visit_lo, group.visit_hi);
    }
    if (group.full_lo < group.full_hi && (lo > group.full_lo || hi < group.full_hi)) {
      return fault(
          "Group %lld of segment %lld of tile %lld leaves keys [%d, %d) unmasked, but token %lld "
          "does not see "
          "key %d there.",
          (long long)g, (long long)segment, (long long)t, group.full_lo, group.full_hi, token,
          lo > group.full_lo ? group.full_lo : group.full_hi - 1);
    }
  }
  if (group.full_lo < group.full_hi &&
      (group.full_lo < group.visit_lo || group.full_hi > group.visit_hi)) {
    return fault(
        "Group %lld of segment %lld of tile %lld is full on [%d, %d) outside its visit range [%d, "
        "%d).",
        (long long)g, (long long)segment, (long long)t, group.full_lo, group.full_hi,
        group.visit_lo, group.visit_hi);
  }
  return MAGI_OK;
}

magi_status Walker::check_row(int64_t t, int64_t q) {
  const auto over = [&](int64_t id) { return slices_[5 * id + 1] <= q; };
  active_.erase(std::remove_if(active_.begin(), active_.end(), over), active_.end());
  for (; next_ < by_start_.size() && slices_[5 * by_start_[next_]] <= q; ++next_) {
    if (!over(by_start_[next_])) active_.push_back(by_start_[next_]);
  }
  wanted_.clear();
  found_.clear();
  for (const int64_t id : active_) {
    const Interval part = row_interval(slices_ + 5 * id, id, q);
    if (part.lo < part.hi) wanted_.push_back(part);
  }
  const magi_tile_desc desc = tile(t);
  for (int64_t i = 0; i < desc.num_segments; ++i) {
    const int32_t* pair = pairs_of(t, i) + 2 * (q - desc.token0);
    if (pair[0] < pair[1]) found_.push_back({pair[0], pair[1], i});
  }
  std::sort(wanted_.begin(), wanted_.end());
  std::sort(found_.begin(), found_.end());
  for (size_t i = 1; i < wanted_.size(); ++i) {
    if (wanted_[i].lo >= wanted_[i - 1].hi) continue;
    return fault(
        "Slices %lld and %lld both allow query %lld and key %lld; slices must be disjoint.",
        (long long)wanted_[i - 1].from, (long long)wanted_[i].from, (long long)q,
        (long long)wanted_[i].lo);
  }
  for (size_t i = 1; i < found_.size(); ++i) {
    if (found_[i].lo >= found_[i - 1].hi) continue;
    return fault("Query %lld sees key %lld twice, in segments %lld and %lld of tile %lld.",
                 (long long)q, (long long)found_[i].lo, (long long)found_[i - 1].from,
                 (long long)found_[i].from, (long long)t);
  }
  return compare_row(t, q);
}

// Walks both lists of disjoint intervals from one end to the other; at every key they must agree.
magi_status Walker::compare_row(int64_t t, int64_t q) {
  size_t w = 0, f = 0;
  int64_t key = 0;
  while (w < wanted_.size() || f < found_.size()) {
    const bool want = w < wanted_.size() && wanted_[w].lo <= key;
    const bool find = f < found_.size() && found_[f].lo <= key;
    if (want && !find) {
      return fault(
          "Query %lld must see key %lld (slice %lld), but no segment of tile %lld holds it.",
          (long long)q, (long long)key, (long long)wanted_[w].from, (long long)t);
    }
    if (find && !want) {
      return fault("Query %lld must not see key %lld, but segment %lld of tile %lld holds it.",
                   (long long)q, (long long)key, (long long)found_[f].from, (long long)t);
    }
    if (want) {
      key = std::min(wanted_[w].hi, found_[f].hi);
    } else {
      key = std::numeric_limits<int64_t>::max();
      if (w < wanted_.size()) key = wanted_[w].lo;
      if (f < found_.size()) key = std::min(key, found_[f].lo);
    }
    if (w < wanted_.size() && wanted_[w].hi <= key) ++w;
    if (f < found_.size() && found_[f].hi <= key) ++f;
  }
  return MAGI_OK;
}

magi_status Walker::check_key_blocks() {
  for (int64_t i = 0; i < MAGI_KEY_BLOCK_SIZES; ++i) {
    const int64_t size = 64 + 16 * i;
    int64_t blocks = 0;
    for (int64_t t = 0; t < header_.num_tiles; ++t) {
      for (int64_t s = 0; s < tile(t).num_segments; ++s) {
        const magi_tile_segment head = segment_of(t, s);
        blocks += (int64_t(head.visit_hi) - head.visit_lo + size - 1) / size;
      }
    }
    if (header_.num_key_blocks[i] != blocks) {
      return fault("The header has %lld blocks of %lld keys; the segments make %lld.",
                   (long long)header_.num_key_blocks[i], (long long)size, (long long)blocks);
    }
  }
  return MAGI_OK;
}

// Blocks are named by their end, visit_hi - 128 b.
magi_status Walker::check_cost(int64_t t) {
  const magi_tile_desc desc = tile(t);
  int64_t cost = 12, blocks = 0;
  for (int64_t i = 0; i < desc.num_segments; ++i) {
    const magi_tile_segment head = segment_of(t, i);
    const int64_t steps = count_steps(int64_t(head.visit_lo) + 1, head.visit_hi, head.visit_hi);
    blocks += steps;
    cost += 16 * steps * header_.num_groups;
    for (int64_t g = 0; g < header_.num_groups; ++g) {
      const auto& group = head.group[g];
      if (group.visit_lo >= group.visit_hi) continue;
      const int64_t last = std::min<int64_t>(head.visit_hi, group.visit_hi + kBlock - 1);
      const int64_t touched = count_steps(int64_t(group.visit_lo) + 1, last, head.visit_hi);
      const int64_t plain = count_steps(group.full_lo + kBlock, group.full_hi, head.visit_hi);
      cost += 3 * (touched - plain);
    }
  }
  const int64_t most = std::numeric_limits<int32_t>::max();
  if (desc.cost != std::min(cost, most) || desc.num_blocks != std::min(blocks, most)) {
    return fault("Tile %lld has cost %d and %d blocks; its segments make %lld and %lld.",
                 (long long)t, desc.cost, desc.num_blocks, (long long)cost, (long long)blocks);
  }
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

extern "C" magi_status magi_tile_plan_check(const int32_t* slices, int64_t num_slices,
                                            const int32_t* plan, int64_t plan_words) {
  try {
    return magi::Walker(slices, num_slices, plan, plan_words).run();
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory to check a tile plan: %s.", error.what());
  }
}
