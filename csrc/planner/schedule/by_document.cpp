// SPDX-License-Identifier: Apache-2.0
// Where documents are many: one document after the other.
//
// By cost, the longest tiles of all documents come first. Then as many documents run at the same
// time as there are, each on a few SMs, and their m-blocks do not stay in L2 together. So the tiles
// of one document and head follow one another, the longest first, and all descend: under a causal
// mask they see the same end, so those that begin together are at the same m-blocks. The longest
// documents come first.
//
// Whether that is better is estimated from the times at which work tiles visit m-blocks: an m-block
// is read again if more than L2 holds was read since its last visit
// (docs/log/ffa_backward_order.md).
#include <array>
#include <cmath>
#include <set>
#include <unordered_map>

#include "planner/schedule/simulate.h"
#include "planner/schedule/work_tiles.h"

namespace magi::schedule {
namespace {

constexpr int kTimeBits = 32, kTicks = 100;  // of a number with a time, and so many a block

// A number for each document. Tiles that end with the same block are of one; one of several
// segments is alone, and so is one that sees nothing.
std::vector<int64_t> documents_of(const TileTable& tiles) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < tiles.count.size(); ++i)
    found.push_back(tiles.is_single[i] && tiles.count[i] > 0 ? tiles.first[i] + tiles.count[i]
                                                             : tiles.blocks + 1 + int64_t(i));
  return found;
}

// The visits of work tiles from `begin` to before `end` to the blocks that are looked at: head and
// block, then the time, in one number. Sorted.
std::vector<int64_t> visits_of(const TileTable& tiles, const WorkTiles& work_tiles,
                               const std::vector<double>& starts, size_t begin, size_t end) {
  std::vector<int64_t> visits;
  visits.reserve(size_t(h100::kLooked) / h100::kOneBlockIn + work_tiles.size());
  for (size_t i = begin; i < end; ++i) {
    const WorkTile& w = work_tiles[i];
    const int64_t first = tiles.first[size_t(w.tile)], count = tiles.count[size_t(w.tile)],
                  last = first + count, back = last - std::min(w.descending, count);
    const int64_t one_in = h100::kOneBlockIn;
    for (int64_t block = (first + one_in - 1) / one_in * one_in; block < last; block += one_in) {
      const int64_t place = block >= back ? last - 1 - block : last - back + block - first;
      const auto ticks = static_cast<int64_t>((starts[i] + double(place)) * kTicks);
      visits.push_back((w.head * tiles.blocks + block) << kTimeBits | ticks);
    }
  }
  std::sort(visits.begin(), visits.end());
  return visits;
}

// The share of visits whose block is not among the last `kept` ones. The time between two visits of
// a block is compared with what it takes to read `kept` others at the rate of what is missed. One
// block in four is looked at: the others give the same.
double missed(const TileTable& tiles, const WorkTiles& work_tiles,
              const std::vector<double>& starts, int num_ctas, double kept) {
  std::vector<double> before;
  int64_t work = 0;
  for (const WorkTile& w : work_tiles)
    before.push_back(double(work += tiles.count[size_t(w.tile)]));
  const double from = std::max(h100::kLookedAt * double(work) - h100::kLooked / 2, 0.0);
  const auto place = [&](double value) {
    return size_t(std::lower_bound(before.begin(), before.end(), value) - before.begin());
  };
  const std::vector<int64_t> visits =
      visits_of(tiles, work_tiles, starts, place(from), place(from + h100::kLooked));
  std::vector<double> gaps;
  for (size_t i = 1; i < visits.size(); ++i)
    if (visits[i] >> kTimeBits == visits[i - 1] >> kTimeBits)
      gaps.push_back(double(visits[i] - visits[i - 1]) / kTicks);
  double low = 0, high = 1;
  for (int step = 0; step < 12; ++step) {
    const double share = (low + high) / 2, since = kept / (num_ctas * std::max(share, 1e-6));
    const auto soon = std::count_if(gaps.begin(), gaps.end(), [&](double g) { return g < since; });
    const double found = 1 - double(soon) / double(std::max<size_t>(visits.size(), 1));
    (found > share ? low : high) = share;
  }
  return (low + high) / 2;
}

}  // namespace

std::vector<int64_t> document_order(const TileTable& tiles) {
  const std::vector<int64_t> document = documents_of(tiles);
  std::unordered_map<int64_t, int64_t> longest;
  for (size_t i = 0; i < document.size(); ++i) {
    int64_t& most = longest[document[i]];
    most = std::max(most, tiles.count[i]);
  }
  std::vector<std::array<int64_t, 5>> keys;  // the last is the tile
  for (int64_t i = 0; i < tiles.size(); ++i) {
    const int64_t d = document[size_t(i)], count = tiles.count[size_t(i)];
    keys.push_back({count > 0, -longest[d], d, -count, i});
  }
  std::sort(keys.begin(), keys.end());
  std::vector<int64_t> order;
  for (const auto& key : keys) order.push_back(key.back());
  return order;
}

WorkTiles work_tiles_by_document(const TileTable& tiles, int heads) {
  const std::vector<int64_t> order = document_order(tiles), document = documents_of(tiles);
  WorkTiles made;
  for (size_t i = 0; i < order.size();) {
    size_t end = i + 1;
    while (end < order.size() && document[size_t(order[end])] == document[size_t(order[i])]) ++end;
    for (int head = 0; head < heads; ++head)
      for (size_t j = i; j < end; ++j)
        made.push_back({order[j], head, tiles.count[size_t(order[j])]});
    i = end;
  }
  return made;
}

double gain_by_document(const TileTable& tiles, const OrderShape& shape, int at_once) {
  int64_t work = 0, single = 0, longest = 0;
  std::set<int64_t> documents;
  const std::vector<int64_t> document = documents_of(tiles);
  for (size_t i = 0; i < tiles.count.size(); ++i) {
    work += tiles.count[i];
    single += tiles.is_single[i] ? tiles.count[i] : 0;
    longest = std::max(longest, tiles.count[i]);
    if (tiles.count[i] > 0) documents.insert(document[i]);
  }
  if (wants_waves(tiles, shape) || longest >= MAGI_TRAVERSAL_WRAP) return -1;
  if (work == 0 || double(single) < h100::kLeastSingle * double(work)) return -1;
  if (documents.size() < 2 || h100::kLeastTiles * documents.size() > tiles.count.size()) return -1;
  double shares[2], ends[2];
  for (int i = 0; i < 2; ++i) {
    WorkTiles some = i ? work_tiles_by_document(tiles, shape.heads_kv)
                       : work_tiles_in_order(tiles, shape, at_once);
    std::vector<double> times;
    for (WorkTile& w : some) {
      if (w.descending == MAGI_TRAVERSAL_WRAP) w.descending = tiles.first[size_t(w.tile)];
      times.push_back(double(tiles.count[size_t(w.tile)]) + h100::kBeginAndEnd);
    }
    shares[i] = missed(tiles, some, starts_of(times, shape.num_ctas), shape.num_ctas,
                       h100::kInL2 / shape.group);
    ends[i] = end_of(times, shape.num_ctas);
  }
  return std::log(ends[0] / ends[1]) + shares[0] * shares[0] - shares[1] * shares[1] / 2;
}

}  // namespace magi::schedule
