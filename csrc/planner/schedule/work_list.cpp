// SPDX-License-Identifier: Apache-2.0
// The work list of a backward that has about two work tiles for each SM: documents of different
// lengths would leave some SMs idle at the end. It is the candidate that ends first.
//
// CTAs that work at the same time should read the same blocks of queries, or Q, dO and dq come from
// device memory several times. A tile with the end of one document and the start of the next is
// best split there: each side then runs with the other tiles of its document. Some heads of the
// longest tiles run beside nothing of their kind, which costs some 20%; it pays where one tile
// would be at work when all others are through. Heads of shorter tiles fill the gaps.
#include "planner/schedule/candidates.h"
#include "planner/schedule/simulate.h"

namespace magi::schedule {
namespace {

std::vector<double> times_of(const std::vector<Row>& rows) {
  std::vector<double> times;
  for (const Row& row : rows) times.push_back(row.time);
  return times;
}

// The best candidate so far, by when the last work tile ends and its parts are combined.
struct Best {
  const Tiles& tiles;
  int num_sms;
  Late late;
  Candidate chosen;
  double end = end_of_candidate(chosen);

  double end_of_candidate(const Candidate& candidate) const {
    const RowMaker maker(tiles, candidate);
    return end_of(times_of(maker.rows()), num_sms, late) +
           h100::kPartialTime * maker.num_partials();
  }
  bool look_at(const Candidate& candidate, double factor) {
    const double other = factor * end_of_candidate(candidate);
    if (other >= end) return false;
    end = other;
    chosen = candidate;
    return true;
  }
};

// First what does not count CTAs that begin late, then the same beside others, now as some do: they
// prepare rows until then. Where each SM has two long work tiles, what those leave to others would
// be whole ones, so filling gains. Where tiles are split by heads, other choices of them are as
// good for the end and read device memory less.
Candidate select(const Tiles& tiles, const OrderShape& shape, Late late) {
  const int n = tiles.size(), num_sms = shape.num_sms;
  Best best{tiles, num_sms, {}, {}};
  // The shorter half by heads does not end before the longest tile.
  const double longest = tiles[0].time + kWorkTileTime,
               sum = sum_of(times_of(RowMaker(tiles, {}).rows())),
               shorter = std::max(h100::kShorterHalfEnd * sum / num_sms, longest),
               worth = tiles.block_m() == 64 ? h100::kWorthHalves : h100::kWorthHalvesWide;
  bool is_by_heads = best.end > worth * shorter, is_shorter_half = is_by_heads;
  if (is_shorter_half) {
    best.end = h100::kShorterHalf * shorter;
    best.chosen = {0, n / 2, n - n / 2};
  }
  if (best.look_at({1, n, 0}, h100::kCutTiles)) is_by_heads = is_shorter_half = false;
  for (int count = 1; count <= h100::kMostLongest; ++count)
    if (best.look_at({0, 0, count},
                     is_shorter_half ? h100::kLongestNotHalf : h100::kLongestSplit)) {
      is_by_heads = true;
      is_shorter_half = false;
    }
  best.late = late;
  best.end = best.end_of_candidate(best.chosen);
  if (is_by_heads) {
    best.look_at({1, n * 7 / 16, n * 8 / 16}, h100::kBesideCut);  // the half from 7/16, and a cut
    best.look_at({2, n * 4 / 16, n * 4 / 16}, h100::kBesideTwoCuts);  // the second quarter, and two
    best.look_at({2, n * 6 / 16, n * 6 / 16}, h100::kBesideTwoCuts);  // 3/8 from 3/8 on, and two
  } else if (h100::kFewParts * h100::kShortest * shape.heads_kv <= num_sms) {
    best.look_at({2, std::max(n - h100::kShortest, 0), h100::kShortest},
                 h100::kShortestSplit);  // the two shortest, and two cuts
  }
  return best.chosen;
}

// The blocks of a work tile in a segment.
Blocks blocks_of(const PlanReader& plan, const magi_work_tile& w, int segment) {
  const Blocks b = plan.blocks(w.tile, segment);
  return {std::max(b.first, w.m_begin), std::min(b.end, w.m_end)};
}

// Blocks in the order in which the work tiles that are taken first need them, which wrap, and how
// many are needed at once.
std::vector<int32_t> order_blocks(const PlanReader& plan, const std::vector<Row>& rows,
                                  int num_ctas, int32_t* at_once) {
  constexpr int kLast = 255;  // steps from the start, from which on the order does not count
  std::vector<int> needed(size_t(plan.num_m_blocks()), kLast);
  for (size_t i = 0; i < std::min(rows.size(), size_t(num_ctas)); ++i) {
    const magi_work_tile& w = rows[i].tile;
    int steps = 0;
    for (int segment = 0; segment < plan.num_segments(w.tile); ++segment) {
      const Blocks b = blocks_of(plan, w, segment);
      const int back = std::min(b.first, b.count());
      for (int block = b.first; block < b.end; ++block) {
        const int before = block >= b.end - back ? b.end - 1 - block : back + block - b.first;
        int& at = needed[size_t(block)];
        at = std::min(at, (steps + before) / w.num_splits);
      }
      steps += std::max(b.count(), 0);
    }
  }
  std::vector<int32_t> order(needed.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return needed[size_t(a)] < needed[size_t(b)]; });
  *at_once = static_cast<int32_t>(std::count(needed.begin(), needed.end(), 0));
  return order;
}

class List {
 public:
  List(const PlanReader& plan, const OrderShape& shape)
      : plan_(plan), shape_(shape), per_tile_(shape.heads_kv * kSplits) {
    const int num_sms = shape.num_sms, num_ctas = shape.num_ctas;
    const Tiles tiles(plan, shape);
    const int64_t blocks = static_cast<int64_t>(plan.num_m_blocks()) * shape.heads_kv * shape.group;
    const int late_ctas = magi_late_ctas(num_sms);
    const Late late{late_ctas, double(std::min<int64_t>(4 * blocks / late_ctas, 1 << 24))};
    const RowMaker maker(tiles, select(tiles, shape, late));
    rows_ = maker.rows();
    partials_ = maker.partials();
    for (size_t i = 0; i < std::min(rows_.size(), size_t(num_ctas)); ++i)
      rows_[i].tile.num_descending = MAGI_TRAVERSAL_WRAP;
    blocks_ = order_blocks(plan, rows_, num_ctas, &header_.num_blocks_at_once);
    find_tiles_of_blocks();
    const std::vector<double> times = times_of(rows_);
    std::vector<double> ends = starts_of(times, num_sms, late);
    for (size_t i = 0; i < ends.size(); ++i) ends[i] += times[i];
    order_entries(ends);
  }

  std::vector<int32_t> words() {
    std::vector<int32_t> made(sizeof(magi_work_list) / 4);
    made.reserve(made.size() + 8 * rows_.size() + 4 * partials_.size() + left_.size() +
                 blocks_.size() + tiles_of_block_.size() + 2 * entries_.size() + 24);
    std::vector<magi_work_tile> work_tiles;
    for (const Row& row : rows_) work_tiles.push_back(row.tile);
    auto add = [&](const auto& values, int32_t* offset) {
      const size_t at = made.size(), count = values.size() * sizeof(values[0]) / 4;
      *offset = static_cast<int32_t>(at);
      made.resize((at + count + 3) / 4 * 4);
      std::copy_n(reinterpret_cast<const int32_t*>(values.data()), count, made.data() + at);
    };
    header_.num_work_tiles = static_cast<int32_t>(rows_.size());
    header_.num_partials = static_cast<int32_t>(partials_.size());
    header_.num_entries = static_cast<int32_t>(entries_.size());
    add(work_tiles, &header_.words_work_tiles);
    add(partials_, &header_.words_partials);
    add(left_, &header_.words_left);
    add(blocks_, &header_.words_blocks);
    add(tiles_of_block_, &header_.words_tiles_of_block);
    add(entries_, &header_.words_entries);
    header_.words_total = static_cast<int32_t>(made.size());
    std::copy_n(reinterpret_cast<const int32_t*>(&header_), sizeof(header_) / 4, made.data());
    return made;
  }

 private:
  void find_tiles_of_blocks() {
    header_.tile_words = (plan_.num_tiles() + 31) / 32;
    tiles_of_block_.resize(size_t(plan_.num_m_blocks()) * size_t(header_.tile_words));
    for (int tile = 0; tile < plan_.num_tiles(); ++tile)
      for (int segment = 0; segment < plan_.num_segments(tile); ++segment) {
        const Blocks b = plan_.blocks(tile, segment);
        for (int block = b.first; block < b.end; ++block)
          tiles_of_block_[size_t(block) * size_t(header_.tile_words) + size_t(tile / 32)] |=
              1u << tile % 32;
      }
  }

  // How many work tiles each part of a tile has, and the order in which blocks and partials will be
  // complete. `ends`: of the work tiles.
  void order_entries(const std::vector<double>& ends) {
    const size_t per_tile = size_t(per_tile_);
    std::vector<double> through(size_t(plan_.num_tiles()) * per_tile);
    left_.resize(through.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      const magi_work_tile& w = rows_[i].tile;
      const int all = kSplits / w.num_splits, first = w.split * all;
      for (int part = first; part < first + all; ++part) {
        const size_t at = size_t(w.tile) * per_tile + size_t(w.head_kv * kSplits + part);
        ++left_[at];
        through[at] = std::max(through[at], ends[i]);
      }
    }
    std::vector<double> complete(size_t(plan_.num_m_blocks()) * per_tile);
    for (int tile = 0; tile < plan_.num_tiles(); ++tile)
      for (int segment = 0; segment < plan_.num_segments(tile); ++segment) {
        const Blocks b = plan_.blocks(tile, segment);
        for (int block = b.first; block < b.end; ++block)
          for (size_t part = 0; part < per_tile; ++part) {
            double& at = complete[size_t(block) * per_tile + part];
            at = std::max(at, through[size_t(tile) * per_tile + part]);
          }
      }
    for (int32_t block = 0; block < plan_.num_m_blocks(); ++block)
      for (int32_t part = 0; part < per_tile_; ++part) entries_.push_back({block, part});
    for (size_t i = 0; i < partials_.size(); ++i) {
      const auto first = through.begin() + std::ptrdiff_t(size_t(partials_[i].tile) * per_tile +
                                                          size_t(partials_[i].head_kv * kSplits));
      const double end = *std::max_element(first, first + kSplits);
      for (int32_t share = 0; share < kSplits; ++share) {
        entries_.push_back({~static_cast<int32_t>(i), share});
        complete.push_back(end);
      }
    }
    std::vector<size_t> order(entries_.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return complete[a] < complete[b]; });
    std::vector<magi_list_entry> sorted;
    for (size_t i : order) sorted.push_back(entries_[i]);
    entries_.swap(sorted);
  }

  const PlanReader& plan_;
  const OrderShape& shape_;
  int per_tile_;
  magi_work_list header_ = {};
  std::vector<Row> rows_;
  std::vector<magi_partial> partials_;
  std::vector<int32_t> left_, blocks_;
  std::vector<uint32_t> tiles_of_block_;
  std::vector<magi_list_entry> entries_;
};

}  // namespace

std::vector<int32_t> make_work_list(const PlanReader& plan, const OrderShape& shape) {
  return List(plan, shape).words();
}

}  // namespace magi::schedule
