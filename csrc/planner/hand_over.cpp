// SPDX-License-Identifier: Apache-2.0
// Pairs of a query chunk and a key chunk, each at the rank that computes it, are handed from rank
// to rank: until none has too much area, or as long as that saves something of what has to be sent.
//
// A rank hands over one pair, or all of its pairs with one chunk. Of choices that are equally good
// it takes the first: single pairs in their order before those that share a query chunk, then those
// that share a key chunk, each by chunk; and the lowest rank to go to. Plans depend on that.
#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>
#include <vector>

#include "planner/status.h"

namespace magi {
namespace {

constexpr int64_t MOST_AREA = int64_t(1) << 60, MOST_COST = int64_t(1) << 44;  // in all

// Sets of ranks, 64 to a word.
using Word = uint64_t;
size_t words_of(size_t world) { return (world + 63) / 64; }

// The query chunks of all pairs, or their key chunks, and what it costs to send them.
class Side {
 public:
  Side(const int64_t* of, int64_t num_pairs, const int64_t* cost, const int64_t* owner,
       int32_t num_chunks, int32_t world)
      : of_(of, of + num_pairs),
        cost_(cost, cost + num_chunks),
        owner_(owner, owner + num_chunks),
        world_(size_t(world)),
        words_(words_of(world_)) {
    users_.assign(size_t(num_chunks) * world_, 0);
    entering_.assign(size_t(num_chunks) * world_, 0);
    lacking_.assign(size_t(num_chunks) * words_, 0);
    fallen_.assign(size_t(num_chunks), 0);
    for (size_t chunk = 0; chunk < size_t(num_chunks); ++chunk)
      for (size_t rank = 0; rank < world_; ++rank) set_lacking(chunk, rank, true);
  }

  size_t of(int32_t pair) const { return size_t(of_[size_t(pair)]); }
  int64_t cost(size_t chunk) const { return cost_[chunk]; }
  // What it costs that `rank` has a chunk.
  int64_t price(size_t chunk, size_t rank) const {
    return size_t(owner_[chunk]) == rank ? 0 : cost_[chunk];
  }
  // What less has to be sent if one pair with the chunk leaves `rank`.
  int64_t leaving(size_t chunk, size_t rank) const {
    return users_[chunk * world_ + rank] == 1 ? price(chunk, rank) : 0;
  }
  // By rank, what more has to be sent if it gets a pair with the chunk.
  const int64_t* entering(size_t chunk) const { return &entering_[chunk * world_]; }
  // The ranks for which that is above 0.
  const Word* lacking(size_t chunk) const { return &lacking_[chunk * words_]; }
  // By how much that has fallen so far, at all ranks together.
  uint64_t fallen(size_t chunk) const { return fallen_[chunk]; }

  void add(int32_t pair, size_t rank) {
    if (users_[of(pair) * world_ + rank]++ == 0) set_lacking(of(pair), rank, false);
  }
  void remove(int32_t pair, size_t rank) {
    if (--users_[of(pair) * world_ + rank] == 0) set_lacking(of(pair), rank, true);
  }

 private:
  void set_lacking(size_t chunk, size_t rank, bool is_lacking) {
    const int64_t more = is_lacking ? price(chunk, rank) : 0;
    if (!is_lacking) fallen_[chunk] += uint64_t(price(chunk, rank));
    entering_[chunk * world_ + rank] = more;
    const Word bit = Word(1) << (rank % 64);
    Word& word = lacking_[chunk * words_ + rank / 64];
    word = more > 0 ? word | bit : word & ~bit;
  }

  std::vector<int32_t> of_;
  std::vector<int64_t> cost_;
  std::vector<int32_t> owner_;
  size_t world_, words_;
  std::vector<int32_t> users_;     // (chunks, world): pairs of a rank with a chunk
  std::vector<int64_t> entering_;  // (chunks, world)
  std::vector<Word> lacking_;      // (chunks, words)
  std::vector<uint64_t> fallen_;   // (chunks,)
};

// Which ranks can take so much area and stay within `room`.
class Fits {
 public:
  Fits(const std::vector<int64_t>& loads, size_t giver, int64_t room)
      : words_(words_of(loads.size())), room_(room) {
    std::vector<int32_t> order;
    for (size_t rank = 0; rank < loads.size(); ++rank)
      if (rank != giver) order.push_back(int32_t(rank));
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return loads[size_t(a)] < loads[size_t(b)]; });
    ranks_.assign((order.size() + 1) * words_, 0);
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t rank = size_t(order[i]);
      loads_.push_back(loads[rank]);
      std::copy_n(&ranks_[i * words_], words_, &ranks_[(i + 1) * words_]);
      ranks_[(i + 1) * words_ + rank / 64] |= Word(1) << (rank % 64);
    }
  }

  // NULL if there is none.
  const Word* operator()(int64_t area) {
    if (area != last_area_) {
      last_area_ = area;
      const auto end = std::upper_bound(loads_.begin(), loads_.end(), room_ - area);
      last_ = end == loads_.begin() ? nullptr : &ranks_[size_t(end - loads_.begin()) * words_];
    }
    return last_;
  }

 private:
  size_t words_;
  int64_t room_;
  std::vector<int64_t> loads_;  // ascending
  std::vector<Word> ranks_;     // (ranks + 1, words): the first so many of them
  int64_t last_area_ = -1;
  const Word* last_ = nullptr;
};

class Placement {
 public:
  Placement(const magi_pairs& pairs, const int64_t* ranks)
      : world_(size_t(pairs.world)),
        words_(words_of(world_)),
        area_(pairs.area, pairs.area + pairs.num_pairs),
        sides_{Side(pairs.query, pairs.num_pairs, pairs.query_cost, pairs.query_owner,
                    pairs.num_queries, pairs.world),
               Side(pairs.key, pairs.num_pairs, pairs.key_cost, pairs.key_owner, pairs.num_keys,
                    pairs.world)},
        rank_(ranks, ranks + pairs.num_pairs),
        loads_(world_, 0),
        row_(world_) {
    // Pairs come by query chunk; the other order is by key chunk.
    order_[0].resize(area_.size());
    std::iota(order_[0].begin(), order_[0].end(), 0);
    order_[1].resize(area_.size());
    std::vector<int32_t> next(size_t(pairs.num_keys) + 1, 0);
    for (const int32_t pair : order_[0]) ++next[sides_[1].of(pair) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (const int32_t pair : order_[0]) order_[1][size_t(next[sides_[1].of(pair)]++)] = pair;
    for (int s = 0; s < 2; ++s) {
      const size_t chunks = size_t(s == 0 ? pairs.num_queries : pairs.num_keys);
      bound_[s].assign(chunks * world_, UNKNOWN);
      place_[s].resize(area_.size());
      held_[s].resize(world_);
      for (size_t i = 0; i < area_.size(); ++i) {
        const int32_t pair = order_[s][i];
        place_[s][size_t(pair)] = int32_t(i);
        if (rank_[size_t(pair)] >= 0) held_[s][size_t(rank_[size_t(pair)])].push_back(int32_t(i));
      }
    }
    for (int32_t pair = 0; pair < int32_t(area_.size()); ++pair) {
      if (rank_[size_t(pair)] < 0) continue;
      const size_t rank = size_t(rank_[size_t(pair)]);
      for (Side& side : sides_) side.add(pair, rank);
      loads_[rank] += area_[size_t(pair)];
    }
  }

  void balance(int64_t most, int64_t most_steps) {
    for (int64_t step = 0; step < most_steps; ++step) {
      const size_t rank =
          size_t(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());  // the first
      // Where nobody has the room, the heavier of the two has less than before, so this ends.
      if (loads_[rank] <= most ||
          !(hand_over(rank, most, true) || hand_over(rank, loads_[rank] - 1, true)))
        break;
    }
  }

  void improve(int64_t most) {
    bool has_changed = true;
    while (has_changed) {
      has_changed = false;
      for (size_t rank = 0; rank < world_; ++rank)
        while (hand_over(rank, most, false)) has_changed = true;
    }
  }

  const std::vector<int32_t>& ranks() const { return rank_; }

 private:
  // Pairs to hand over, from `begin` to before `end` of those that the rank holds in an order.
  struct Choice {
    double value;  // the less the better
    int order;
    size_t begin, end;
    size_t to;
  };

  // To another rank that stays within `room`: with `must` what costs least for its area, else what
  // saves most. False if nothing fits, or saves.
  bool hand_over(size_t rank, int64_t room, bool must) {
    Fits fits(loads_, rank, room);
    Choice best{must ? std::numeric_limits<double>::infinity() : 0, 0, 0, 0, world_};
    try_pairs(rank, fits, must, best);
    for (int shared = 0; shared < 2; ++shared) try_groups(shared, rank, fits, must, best);
    if (best.to == world_) return false;
    const std::vector<int32_t>& held = held_[best.order][rank];
    moving_.clear();
    for (size_t i = best.begin; i < best.end; ++i)
      moving_.push_back(order_[best.order][size_t(held[i])]);
    for (const int32_t pair : moving_) move(pair, rank, best.to);
    return true;
  }

  void move(int32_t pair, size_t from, size_t to) {
    for (int s = 0; s < 2; ++s) {
      const int32_t place = place_[s][size_t(pair)];
      std::vector<int32_t>&less = held_[s][from], &more = held_[s][to];
      less.erase(std::lower_bound(less.begin(), less.end(), place));
      more.insert(std::lower_bound(more.begin(), more.end(), place), place);
      sides_[s].remove(pair, from);
      sides_[s].add(pair, to);
    }
    for (int s = 0; s < 2; ++s) {
      const Side& other = sides_[1 - s];
      const size_t group = sides_[s].of(pair) * world_, chunk = other.of(pair);
      bound_[s][group + from] -= uint64_t(other.cost(chunk)) + other.fallen(chunk);
      bound_[s][group + to] += other.fallen(chunk);
    }
    loads_[from] -= area_[size_t(pair)];
    loads_[to] += area_[size_t(pair)];
    rank_[size_t(pair)] = int32_t(to);
  }

  static double value_of(int64_t price, int64_t area, bool must) {
    return must ? double(price) / double(area) : double(price);
  }

  void try_pairs(size_t rank, Fits& fits, bool must, Choice& best) const {
    const std::vector<int32_t>& held = held_[0][rank];
    for (size_t i = 0; i < held.size(); ++i) {
      const int32_t pair = held[i];  // its own place by query chunk
      const int64_t area = area_[size_t(pair)];
      const Word* ranks = area > 0 ? fits(area) : nullptr;
      if (!ranks) continue;
      const size_t query = sides_[0].of(pair), key = sides_[1].of(pair);
      const int64_t saved = sides_[0].leaving(query, rank) + sides_[1].leaving(key, rank);
      if (value_of(-saved, area, must) >= best.value) continue;
      int64_t price;
      const size_t to = cheapest_of(ranks, query, key, &price);
      const double value = value_of(price - saved, area, must);
      if (value < best.value) best = {value, 0, i, i + 1, to};
    }
  }

  // The first of the ranks for which a pair costs least; there is one at least.
  size_t cheapest_of(const Word* ranks, size_t query, size_t key, int64_t* price) const {
    const Word *query_lacks = sides_[0].lacking(query), *key_lacks = sides_[1].lacking(key);
    size_t with_both = world_, with_query = world_, with_key = world_, with_none = world_;
    const auto note = [this](size_t& first, size_t word, Word found) {
      if (found && first == world_) first = word * 64 + size_t(__builtin_ctzll(found));
    };
    for (size_t w = 0; w < words_ && with_both == world_; ++w) {
      note(with_both, w, ranks[w] & ~query_lacks[w] & ~key_lacks[w]);
      note(with_query, w, ranks[w] & ~query_lacks[w]);
      note(with_key, w, ranks[w] & ~key_lacks[w]);
      note(with_none, w, ranks[w]);
    }
    *price = 0;
    if (with_both < world_) return with_both;
    const int64_t query_cost = sides_[0].cost(query), key_cost = sides_[1].cost(key);
    *price = query_cost + key_cost;
    if (with_query == world_ && with_key == world_) return with_none;
    const bool query_is_there =
        with_key == world_ ||
        (with_query < world_ &&
         (key_cost < query_cost || (key_cost == query_cost && with_query < with_key)));
    *price = query_is_there ? key_cost : query_cost;
    return query_is_there ? with_query : with_key;
  }

  // All pairs of the rank with one chunk of side `shared`. No two of them share the other chunk as
  // well, so what they save and cost there adds up. One alone was tried before.
  void try_groups(int shared, size_t rank, Fits& fits, bool must, Choice& best) {
    const Side &side = sides_[shared], &other = sides_[1 - shared];
    const std::vector<int32_t>&held = held_[shared][rank], &order = order_[shared];
    const size_t world = world_;  // in locals of their own, so that sums over ranks are vectorised
    int64_t* const row = row_.data();
    for (size_t begin = 0, end; begin < held.size(); begin = end) {
      const size_t chunk = side.of(order[size_t(held[begin])]);
      int64_t area = 0, saved = side.price(chunk, rank);
      uint64_t fallen = side.fallen(chunk);
      for (end = begin; end < held.size(); ++end) {
        const int32_t pair = order[size_t(held[end])];
        if (side.of(pair) != chunk) break;
        area += area_[size_t(pair)];
        saved += other.leaving(other.of(pair), rank);
        fallen += other.fallen(other.of(pair));
      }
      const Word* ranks = area > 0 && end - begin > 1 ? fits(area) : nullptr;
      uint64_t& bound = bound_[shared][chunk * world_ + rank];
      if (!ranks) continue;
      const int64_t least = std::max(int64_t(bound - fallen), int64_t(0));
      if (value_of(least - saved, area, must) >= best.value) continue;
      std::copy_n(side.entering(chunk), world, row);
      for (size_t i = begin; i < end; ++i) {
        const int64_t* more = other.entering(other.of(order[size_t(held[i])]));
        for (size_t r = 0; r < world; ++r) row[r] += more[r];
      }
      size_t to = world;
      for (size_t r = 0; r < world; ++r)
        if ((ranks[r / 64] >> (r % 64) & 1) && (to == world || row[r] < row[to])) to = r;
      const double value = value_of(row[to] - saved, area, must);
      if (value < best.value) best = {value, shared, begin, end, to};
      row[rank] = std::numeric_limits<int64_t>::max();  // where they are already
      bound = uint64_t(*std::min_element(row, row + world)) + fallen;
    }
  }

  size_t world_, words_;
  std::vector<int64_t> area_;
  Side sides_[2];
  std::vector<int32_t> rank_;
  std::vector<int64_t> loads_;
  // Orders of pairs, by query chunk and by key chunk: the pairs, the place of each pair, and for
  // each rank the places of those that it holds, ascending.
  std::vector<int32_t> order_[2], place_[2];
  std::vector<std::vector<int32_t>> held_[2];
  // By shared side (chunks, world): what has to be sent at least to a rank that gets all pairs of
  // another with a chunk, as found at one time, plus the sum of what `Side::fallen` was then for
  // the chunk and for the other chunks of these pairs. It may have become less since by what that
  // sum has grown. So most groups need not be priced for every rank again when little has changed.
  static constexpr uint64_t UNKNOWN = uint64_t(0) - (uint64_t(1) << 62);
  std::vector<uint64_t> bound_[2];
  std::vector<int64_t> row_;
  std::vector<int32_t> moving_;
};

magi_status check_side(const char* name, const int64_t* cost, const int64_t* owner,
                       int32_t num_chunks, int32_t world, int64_t* total) {
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (cost[chunk] < 0 || cost[chunk] > MOST_COST - *total)
      return fail(MAGI_INVALID_ARGUMENT,
                  "The %s chunk %d costs %lld; costs are >= 0, and all of them at most 2^44.", name,
                  chunk, static_cast<long long>(cost[chunk]));
    *total += cost[chunk];
    if (owner[chunk] < 0 || owner[chunk] >= world)
      return fail(MAGI_INVALID_ARGUMENT, "The %s chunk %d is owned by rank %lld of %d.", name,
                  chunk, static_cast<long long>(owner[chunk]), world);
  }
  return MAGI_OK;
}

magi_status check_pairs(const magi_pairs& pairs, const int64_t* rank) {
  const int64_t most = std::numeric_limits<int32_t>::max();
  if (pairs.num_pairs < 0 || pairs.num_pairs > most || pairs.num_queries < 0 ||
      pairs.num_keys < 0 || pairs.world < 1)
    return fail(MAGI_INVALID_ARGUMENT,
                "%lld pairs of %d query chunks and %d key chunks at %d ranks; give 0 to 2^31 - 1, "
                "and 1 rank at least.",
                static_cast<long long>(pairs.num_pairs), pairs.num_queries, pairs.num_keys,
                pairs.world);
  int64_t total = 0, area = 0;
  magi_status status = check_side("query", pairs.query_cost, pairs.query_owner, pairs.num_queries,
                                  pairs.world, &total);
  if (status == MAGI_OK)
    status =
        check_side("key", pairs.key_cost, pairs.key_owner, pairs.num_keys, pairs.world, &total);
  if (status != MAGI_OK) return status;
  for (int64_t i = 0; i < pairs.num_pairs; ++i) {
    const int64_t query = pairs.query[i], key = pairs.key[i];
    const auto number = static_cast<long long>(i);
    if (query < 0 || query >= pairs.num_queries || key < 0 || key >= pairs.num_keys)
      return fail(MAGI_INVALID_ARGUMENT,
                  "Pair %lld is of chunks %lld and %lld, beyond %d and %d chunks.", number,
                  static_cast<long long>(query), static_cast<long long>(key), pairs.num_queries,
                  pairs.num_keys);
    if (i > 0 &&
        (query < pairs.query[i - 1] || (query == pairs.query[i - 1] && key <= pairs.key[i - 1])))
      return fail(MAGI_INVALID_ARGUMENT,
                  "Pair %lld does not follow the one before it; give each pair once, ascending by "
                  "query chunk and then by key chunk.",
                  number);
    if (pairs.area[i] < 0 || pairs.area[i] > MOST_AREA - area)
      return fail(MAGI_INVALID_ARGUMENT,
                  "Pair %lld has area %lld; areas are >= 0, and all of them at most 2^60.", number,
                  static_cast<long long>(pairs.area[i]));
    area += pairs.area[i];
    if (rank[i] < -1 || rank[i] >= pairs.world)
      return fail(MAGI_INVALID_ARGUMENT, "Pair %lld is at rank %lld of %d.", number,
                  static_cast<long long>(rank[i]), pairs.world);
  }
  return MAGI_OK;
}

template <class Change>
magi_status hand_over(const magi_pairs& pairs, int64_t* rank, const Change& change) {
  const magi_status status = check_pairs(pairs, rank);
  if (status != MAGI_OK) return status;
  try {
    Placement placement(pairs, rank);
    change(placement);
    std::copy(placement.ranks().begin(), placement.ranks().end(), rank);
  } catch (const std::exception& error) {
    return fail(MAGI_CAPACITY, "Handing over pairs needs more memory: %s.", error.what());
  }
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

extern "C" magi_status magi_balance_pairs(const magi_pairs* pairs, int64_t most, int64_t most_steps,
                                          int64_t* rank) {
  return magi::hand_over(*pairs, rank,
                         [&](auto& placement) { placement.balance(most, most_steps); });
}

extern "C" magi_status magi_improve_pairs(const magi_pairs* pairs, int64_t most, int64_t* rank) {
  return magi::hand_over(*pairs, rank, [&](auto& placement) { placement.improve(most); });
}
