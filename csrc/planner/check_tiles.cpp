// SPDX-License-Identifier: Apache-2.0
// What is checked of each tile of a plan: its segments, their groups, every row, and the cost.

#include <algorithm>
#include <limits>

#include "planner/plan_walker.h"

namespace magi {
namespace walk {
namespace {

constexpr int64_t kBlock = 128;

// Numbers x in [first, last] with x = anchor - 128 b for some integer b.
int64_t count_steps(int64_t first, int64_t last, int64_t anchor) {
  if (first > last) return 0;
  const int64_t top =
      last - (((last - anchor) % kBlock) + kBlock) % kBlock;  // largest such x <= last
  return top < first ? 0 : (top - first) / kBlock + 1;
}

}  // namespace

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
    return fault("Segment %lld of tile %lld visits no keys; leave it out.", (long long)segment,
                 (long long)t);
  }
  if (head.visit_lo != visit_lo || head.visit_hi != visit_hi) {
    return fault("Segment %lld of tile %lld visits keys [%d, %d); its groups visit [%lld, %lld).",
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
        "Group %lld of segment %lld of tile %lld visits keys [%d, %d); ranges lie in [0, %d].",
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
          "visits keys [%d, %d).",
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

}  // namespace walk
}  // namespace magi
