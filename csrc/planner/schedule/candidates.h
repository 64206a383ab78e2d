// SPDX-License-Identifier: Apache-2.0
// Candidates for a work list. One cuts up to two tiles where a document ends and the next begins,
// and splits a run of tiles by query heads.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner/schedule/heuristics_h100.h"
#include "planner/schedule/work_tiles.h"

namespace magi::schedule {

constexpr int kSplits = MAGI_LIST_SPLITS;
using h100::kMaskedStepTime;
using h100::kMayBeCut;
using h100::kStepTime;
using h100::kWorkTileTime;

// A tile, and how long it takes for all query heads of a kv head, without begin and end.
struct TimedTile {
  int tile = 0, time = 0;
};

// The tiles of a plan, the longest first, ties as in the plan.
class Tiles {
 public:
  Tiles(const PlanReader& plan, const OrderShape& shape) : plan_(plan), shape_(shape) {
    for (int i = 0; i < plan.num_tiles(); ++i) {
      const int tile = plan.order()[i];
      int64_t steps = 0, masked = 0;
      for (int s = 0; s < plan.num_segments(tile); ++s) {
        steps += plan.blocks(tile, s).count();
        masked += plan.num_masked(tile, s);
      }
      sorted_.push_back({tile, time_of(steps, masked)});
    }
    std::stable_sort(sorted_.begin(), sorted_.end(),
                     [](const TimedTile& a, const TimedTile& b) { return a.time > b.time; });
    for (int i = 0; i < std::min(size(), kMayBeCut); ++i)
      cuts_.push_back(plan.cut(sorted_[i].tile));
  }

  int size() const { return static_cast<int>(sorted_.size()); }
  const TimedTile& operator[](int i) const { return sorted_[static_cast<size_t>(i)]; }
  // The block where a tile is best cut, or 0.
  int cut(int i) const { return i < static_cast<int>(cuts_.size()) ? cuts_[size_t(i)] : 0; }
  Blocks blocks(int i) const { return plan_.blocks(sorted_[size_t(i)].tile, 0); }
  int heads() const { return shape_.heads_kv; }
  int block_m() const { return plan_.block_m(); }
  // Tiles of which there may be parts.
  int may_be_split() const { return (size() + 1) / 2; }

  // Bounded, so that sums fit.
  int time_of(int64_t steps, int64_t masked) const {
    const int64_t time = kStepTime * steps + (kMaskedStepTime - kStepTime) * masked;
    return static_cast<int>(std::min<int64_t>(time, 1 << 20)) * shape_.group;
  }

 private:
  const PlanReader& plan_;
  const OrderShape& shape_;
  std::vector<TimedTile> sorted_;
  std::vector<int> cuts_;
};

struct Row {
  magi_work_tile tile;
  int time;
};

// What a candidate does: cuts so many tiles, and splits `count` tiles by heads, the `from`-th of
// the sorted and on.
struct Candidate {
  int cuts = 0, from = 0, count = 0;
};

// The work tiles of a candidate. Whole tiles and sides of cuts come where their time puts them.
// Parts by heads are together behind all that takes as long: one part of all of them before the
// next part, so that what runs at the same time reads the same blocks.
class RowMaker {
 public:
  RowMaker(const Tiles& tiles, const Candidate& wanted) : tiles_(tiles) {
    const int most = std::min(wanted.cuts, tiles.may_be_split());
    for (int i = 0; i < std::min(wanted.from, tiles.size()) && int(cut_.size()) < most; ++i)
      if (tiles.cut(i) > 0) cut_.push_back(i);
    from_ = wanted.from;
    count_ =
        std::min({wanted.count, tiles.size() - from_, tiles.may_be_split() - int(cut_.size())});
    count_ = std::max(count_, 0);
  }

  std::vector<Row> rows() const {
    struct Item {
      Row row;
      bool is_whole, is_parts;
    };
    std::vector<Item> items;
    for (int i = 0; i < tiles_.size(); ++i) {
      const bool is_cut = std::find(cut_.begin(), cut_.end(), i) != cut_.end();
      if (!is_cut && !(i >= from_ && i < from_ + count_))
        items.push_back({{whole(i), tiles_[i].time}, true, false});
    }
    for (size_t n = 0; n < cut_.size(); ++n)
      for (int side = 0; side < 2; ++side) items.push_back({side_of(int(n), side), false, false});
    if (count_ > 0)
      items.push_back({{{}, (tiles_[from_].time + kSplits - 1) / kSplits}, false, true});
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.row.time > b.row.time; });
    std::vector<Row> made;
    for (size_t i = 0, end = 0; i < items.size(); i = end) {
      // Whole tiles that take as long go head by head: the first heads are through sooner, and
      // less is left to the kernel behind.
      end = i + 1;
      while (items[i].is_whole && end < items.size() && items[end].is_whole &&
             items[end].row.time == items[i].row.time)
        ++end;
      if (items[i].is_parts)
        add_parts(made);
      else
        for (int head = 0; head < tiles_.heads(); ++head)
          for (size_t j = i; j < end; ++j) add(made, items[j].row, head);
    }
    return made;
  }

  int num_partials() const { return (int(cut_.size()) + count_) * tiles_.heads(); }
  std::vector<magi_partial> partials() const {
    std::vector<magi_partial> made;
    for (int i : cut_) add_partials(made, i, 2);
    for (int i = 0; i < count_; ++i) add_partials(made, from_ + i, kSplits);
    return made;
  }

 private:
  magi_work_tile whole(int i) const { return {tiles_[i].tile, 0, 0, 1, 0, INT_MAX, 0, -1}; }

  Row side_of(int n, int side) const {
    const int i = cut_[size_t(n)], at = tiles_.cut(i);
    const Blocks b = tiles_.blocks(i);
    Row row{whole(i), 0};
    (side ? row.tile.m_begin : row.tile.m_end) = at;
    row.tile.partial = n * tiles_.heads();
    const int steps = side ? b.end - at : at - b.first;
    row.time = tiles_.time_of(steps, steps);
    return row;
  }

  void add(std::vector<Row>& made, Row row, int head) const {
    row.tile.head_kv = head;
    if (row.tile.partial >= 0) row.tile.partial += head;
    row.time += kWorkTileTime;
    made.push_back(row);
  }

  void add_parts(std::vector<Row>& made) const {
    for (int split = 0; split < kSplits; ++split)
      for (int i = 0; i < count_; ++i)
        for (int head = 0; head < tiles_.heads(); ++head) {
          Row row{whole(from_ + i), tiles_[from_ + i].time / kSplits};
          row.tile.split = split;
          row.tile.num_splits = kSplits;
          row.tile.partial = (int(cut_.size()) + i) * tiles_.heads();
          add(made, row, head);
        }
  }

  void add_partials(std::vector<magi_partial>& made, int i, int parts) const {
    for (int head = 0; head < tiles_.heads(); ++head)
      made.push_back({tiles_[i].tile, head, parts, 0});
  }

  const Tiles& tiles_;
  std::vector<int> cut_;  // of the sorted
  int from_ = 0, count_ = 0;
};

}  // namespace magi::schedule
