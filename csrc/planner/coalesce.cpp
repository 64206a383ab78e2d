// SPDX-License-Identifier: Apache-2.0
// A mask with its FULL slices coalesced, so that a tile meets few of them.
//
// A plan takes time by how many slices meet how many tiles. In a transposed block-causal mask a
// tile of keys meets one slice of every later block, side by side; they end up as one interval of
// each row, but n blocks are met n^2/2 times. So the union of the FULL slices is divided into
// strips: consecutive rows that see the same columns without a break. A sweep over the rows holds
// the *runs*, maximal intervals of columns that the current row sees, and each change of a run ends
// a strip. A slice begins once and ends once, either changes two runs at most, so there are at most
// three times as many strips as slices, and they take O(n log n).
#include <algorithm>
#include <exception>
#include <map>
#include <vector>

#include "planner/status.h"
#include "planner/tile_core.h"

namespace magi {
namespace {

using tile::Slice;

struct Event {
  int32_t row, lo, hi;
  bool begins;
};

// Where slices end and others begin, ends are taken first.
bool operator<(const Event& a, const Event& b) {
  return a.row != b.row ? a.row < b.row : !a.begins && b.begins;
}

class Sweep {
 public:
  explicit Sweep(std::vector<Slice>& strips) : strips_(strips) {}

  // False if a column is seen twice.
  bool take(const Event& event) { return event.begins ? begin(event) : end(event); }

 private:
  struct Run {
    int32_t hi, row;  // columns up to hi, since this row
  };
  using Runs = std::map<int32_t, Run>;  // by the first column

  bool begin(const Event& event) {
    int32_t lo = event.lo, hi = event.hi;
    auto after = runs_.lower_bound(lo);
    if (after != runs_.end() && after->first < hi) return false;
    if (after != runs_.begin()) {
      const auto before = std::prev(after);
      if (before->second.hi > lo) return false;
      if (before->second.hi == lo) {
        lo = before->first;
        close(before, event.row);
      }
    }
    if (after != runs_.end() && after->first == hi) {
      hi = after->second.hi;
      close(after, event.row);
    }
    runs_[lo] = Run{hi, event.row};
    return true;
  }

  bool end(const Event& event) {
    const auto at = std::prev(runs_.upper_bound(event.lo));
    const int32_t lo = at->first, hi = at->second.hi;
    close(at, event.row);
    if (lo < event.lo) runs_[lo] = Run{event.lo, event.row};
    if (event.hi < hi) runs_[event.hi] = Run{hi, event.row};
    return true;
  }

  void close(Runs::iterator at, int32_t row) {
    if (at->second.row < row)
      strips_.push_back(Slice{at->second.row, row, at->first, at->second.hi, 0});
    runs_.erase(at);
  }

  std::vector<Slice>& strips_;
  Runs runs_;
};

int64_t meetings(const std::vector<Slice>& slices, int32_t tile_tokens) {
  int64_t sum = 0;
  for (const Slice& s : slices) sum += (s.q1 - 1) / tile_tokens - s.q0 / tile_tokens + 1;
  return sum;
}

// Empty if two FULL slices share a pair.
std::vector<Slice> cut_anew(const std::vector<Slice>& slices) {
  std::vector<Event> events;
  std::vector<Slice> cut;
  for (const Slice& s : slices) {
    if (s.type != 0) {
      cut.push_back(s);
      continue;
    }
    events.push_back(Event{s.q0, s.k0, s.k1, true});
    events.push_back(Event{s.q1, s.k0, s.k1, false});
  }
  std::stable_sort(events.begin(), events.end());
  Sweep sweep(cut);
  for (const Event& event : events)
    if (!sweep.take(event)) return {};
  return cut;
}

int64_t strips_of(const int32_t* slices, int64_t num_slices, int32_t tile_tokens, int32_t* strips) {
  std::vector<Slice> given;
  given.reserve(size_t(num_slices));
  for (int64_t i = 0; i < num_slices; ++i) {
    const int32_t* row = slices + 5 * i;
    Slice s{row[0], row[1], row[2], row[3], row[4]};
    if (tile::trim_slice(s)) given.push_back(s);
  }
  const std::vector<Slice> cut = cut_anew(given);
  const bool is_less =
      !cut.empty() && 2 * meetings(cut, tile_tokens) <= meetings(given, tile_tokens);
  const std::vector<Slice>& best = is_less ? cut : given;
  for (const Slice& s : best) {
    const int32_t row[5] = {s.q0, s.q1, s.k0, s.k1, s.type};
    strips = std::copy(row, row + 5, strips);
  }
  return int64_t(best.size());
}

}  // namespace
}  // namespace magi

extern "C" magi_status magi_tile_strips_host(const int32_t* slices, int64_t num_slices,
                                             int32_t tile_tokens, int32_t* strips,
                                             int64_t* num_strips) {
  if (num_slices < 0 || tile_tokens < 1 || num_strips == nullptr ||
      (num_slices > 0 && (slices == nullptr || strips == nullptr)))
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "num_slices is %lld and tile_tokens %d; give that many rows, room for three "
        "times as many, tiles of a token or more, and a place for the number of strips.",
        (long long)num_slices, tile_tokens);
  for (int64_t i = 0; i < num_slices; ++i)
    if (slices[5 * i + 4] < 0 || slices[5 * i + 4] > 3)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Slice %lld has type %d; types are 0 to 3.",
                        (long long)i, slices[5 * i + 4]);
  try {
    *num_strips = magi::strips_of(slices, num_slices, tile_tokens, strips);
    return MAGI_OK;
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory for the strips of %lld slices: %s.",
                      (long long)num_slices, error.what());
  }
}
