// SPDX-License-Identifier: Apache-2.0
// The order in which a backward with m-blocks of 80 takes its work tiles, and where each begins its
// m-blocks.
//
// CTAs that work at the same time should read the same m-blocks, which are then in L2. All m-blocks
// of one kv head do not fit if its tiles are more than there are SMs. So CTAs have to keep in step.
// Under a causal mask tile x of n sees the m-blocks from x on. Imagine a clock that counts m-blocks
// and starts anew after the last one:
//
// * At time 0 a tile begins. It takes as many m-blocks from the end, descending, as lie before its
//   first one, and then the others ascending. At time t it is at m-block t or n - t, and so is
//   every tile that began with it.
// * It ends at time n - x. Then the tile that sees the m-blocks from n - x on can begin, ascending.
//
// So tiles form groups that fill one round of the clock (pairs under a causal mask). As many groups
// as there are SMs make a wave of the list: first the tiles that begin it, then the others in the
// order in which those end. Tiles that fill no wave come behind, in batches of about the same
// length, which begin and end together. The last waves go by cost, so that all SMs end together.
//
// Where an L2 group of heads is one wave (32K tokens on 132 SMs), or tiles see different ends
// (documents), the list is the plan's own order, head by head.
#include "planner/schedule/work_tiles.h"

#include <cmath>
#include <cstddef>
#include <map>

#include "planner/schedule/l2_groups.h"
#include "planner/schedule/simulate.h"

namespace magi::schedule {
namespace {

using Numbers = std::vector<int64_t>;

// Numbers from 0 on in the order in which `before` has them, ties by number.
template <typename Before>
Numbers sorted_numbers(size_t count, Before before) {
  Numbers order(count);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return before(size_t(a), size_t(b)); });
  return order;
}

// The time since `begin` on a clock of so many blocks.
double clock_of(double start, double begin, int64_t blocks) {
  const double clock = std::fmod(start - begin, double(blocks));
  return clock < 0 ? clock + double(blocks) : clock;
}

std::vector<double> starts_of_tiles(const TileTable& tiles, const WorkTiles& some, int num_ctas) {
  std::vector<double> times;
  for (const WorkTile& w : some)
    times.push_back(double(tiles.count[size_t(w.tile)]) + h100::kBeginAndEnd);
  return starts_of(times, num_ctas);
}

// The share of the work of the second and third L2 group that is too far from the clock; of the
// first where there are no others.
double share_out_of_step(const WorkTiles& work_tiles, const TileTable& tiles,
                         const OrderShape& shape) {
  const size_t size = size_t(tiles.size()) * size_t(shape.heads_at_once(tiles.size()));
  const WorkTiles some(work_tiles.begin(),
                       work_tiles.begin() + std::ptrdiff_t(std::min(3 * size, work_tiles.size())));
  const std::vector<double> starts = starts_of_tiles(tiles, some, shape.num_ctas);
  const double kept = h100::kInL2 / shape.group;
  int64_t out = 0, work = 0;
  for (size_t begin = work_tiles.size() > size ? size : 0; begin < some.size(); begin += size)
    for (size_t i = begin; i < std::min(begin + size, some.size()); ++i) {
      const size_t tile = size_t(some[i].tile);
      const double wanted =
          some[i].descending == MAGI_TRAVERSAL_WRAP ? 0.0 : double(tiles.first[tile]);
      const bool is_out =
          std::fabs(clock_of(starts[i], starts[begin], tiles.blocks) - wanted) > kept;
      out += is_out ? tiles.count[tile] : 0;
      work += tiles.count[tile];
    }
  return work ? double(out) / double(work) : 0.0;
}

// Each tile that sees something once: the tiles group by group, and the group of each. `batch` of
// each group, not falling; the groups of one take about as long.
struct Batches {
  Numbers tile, group, batch;
};

struct Tried {
  TileGroups groups;
  Numbers missing;  // of each group, blocks of a round
  double loss;
};

Tried try_groups(const TileTable& tiles, int beyond) {
  Tried made{group_tiles(tiles.count, tiles.blocks + beyond), {}, 0};
  const size_t groups = made.groups.groups.empty() ? 0 : size_t(made.groups.groups.back()) + 1;
  made.missing.assign(groups, tiles.blocks);
  for (size_t i = 0; i < made.groups.tiles.size(); ++i)
    made.missing[size_t(made.groups.groups[i])] -= tiles.count[size_t(made.groups.tiles[i])];
  int64_t loss = 0;
  for (int64_t m : made.missing) loss += m <= h100::kSlack ? std::abs(m) : h100::kUnfilled;
  made.loss = double(loss) / double(std::max<size_t>(groups, 1));
  return made;
}

// First the groups that fill a wave.
Batches batches_of(const TileTable& tiles) {
  Tried best = try_groups(tiles, 1);
  for (int beyond = 2; beyond <= h100::kMostBeyond; ++beyond) {
    Tried next = try_groups(tiles, beyond);
    if (next.loss < best.loss) best = std::move(next);
  }
  const Numbers &tile = best.groups.tiles, &group = best.groups.groups, &missing = best.missing;
  const auto is_filled = [&](size_t g) { return missing[g] <= h100::kSlack; };
  Numbers first(missing.size());
  for (size_t i = tile.size(); i-- > 0;) first[size_t(group[i])] = tile[i];
  const Numbers order = sorted_numbers(missing.size(), [&](size_t a, size_t b) {
    const int64_t of_a = is_filled(a) ? -tiles.blocks : missing[a],
                  of_b = is_filled(b) ? -tiles.blocks : missing[b];
    if (of_a != of_b) return of_a < of_b;
    return (is_filled(a) ? int64_t(a) : first[a]) < (is_filled(b) ? int64_t(b) : first[b]);
  });
  Batches made;
  Numbers number(missing.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t g = size_t(order[i]);
    number[g] = int64_t(i);
    // Groups that miss up to two blocks more than the first of a batch belong to it.
    const bool begins = made.batch.empty() || made.batch.back() == -tiles.blocks ||
                        missing[g] > made.batch.back() + 2;
    made.batch.push_back(is_filled(g) ? -tiles.blocks : begins ? missing[g] : made.batch.back());
  }
  const Numbers by_number = sorted_numbers(tile.size(), [&](size_t a, size_t b) {
    return number[size_t(group[a])] < number[size_t(group[b])];
  });
  for (int64_t i : by_number) {
    made.tile.push_back(tile[size_t(i)]);
    made.group.push_back(number[size_t(group[size_t(i)])]);
  }
  return made;
}

// A tile and head, the number of the entry, which is a group and a head, and which of the group it
// is.
struct Listed {
  int64_t tile, head, entry, side;
};

// Batch by batch, in each head by head, the groups one after the other.
std::vector<Listed> list_batches(const Batches& batches, int heads) {
  const size_t groups = batches.batch.size();
  Numbers begin(groups + 1);
  for (int64_t group : batches.group) ++begin[size_t(group) + 1];
  for (size_t g = 0; g < groups; ++g) begin[g + 1] += begin[g];
  std::vector<Listed> made;
  int64_t entry = 0;
  for (size_t from = 0, to = 0; from < groups; from = to) {
    while (to < groups && batches.batch[to] == batches.batch[from]) ++to;
    for (int head = 0; head < heads; ++head)
      for (size_t g = from; g < to; ++g, ++entry)
        for (int64_t at = begin[g]; at < begin[g + 1]; ++at)
          made.push_back({batches.tile[size_t(at)], head, entry, at - begin[g]});
  }
  return made;
}

// In the first entries, of so many: of each group those first that are there, and groups in that
// order.
void put_first_there(std::vector<Listed>& listed, int64_t entries, const double* there_at) {
  size_t count = 0;
  while (count < listed.size() && listed[count].entry < entries) ++count;
  std::vector<Listed> some(listed.begin(), listed.begin() + std::ptrdiff_t(count));
  const Numbers inside = sorted_numbers(count, [&](size_t a, size_t b) {
    if (some[a].entry != some[b].entry) return some[a].entry < some[b].entry;
    const double at_a = there_at[some[a].tile], at_b = there_at[some[b].tile];
    return at_a != at_b ? at_a < at_b : some[a].side < some[b].side;
  });
  Numbers tile, begins;  // the tile with which each entry begins
  for (size_t i = 0; i < count; ++i) {
    tile.push_back(some[size_t(inside[i])].tile);
    if (some[i].side == 0) begins.push_back(tile.back());
  }
  const Numbers order = sorted_numbers(
      begins.size(), [&](size_t a, size_t b) { return there_at[begins[a]] < there_at[begins[b]]; });
  Numbers place(begins.size());
  for (size_t i = 0; i < order.size(); ++i) place[size_t(order[i])] = int64_t(i);
  const Numbers by_place = sorted_numbers(count, [&](size_t a, size_t b) {
    return place[size_t(some[a].entry)] < place[size_t(some[b].entry)];
  });
  for (size_t i = 0; i < count; ++i) {
    const size_t from = size_t(by_place[i]);
    listed[i] = {tile[from], some[i].head, place[size_t(some[from].entry)], some[from].side};
  }
}

// How many blocks each takes backwards: as many as the clock is behind its first one, by the time
// at which the first work tile of its wave starts.
void set_descending(WorkTiles& some, const Numbers& wave, const TileTable& tiles, int num_ctas) {
  const std::vector<double> starts = starts_of_tiles(tiles, some, num_ctas);
  for (size_t i = 0, begin = 0; i < some.size(); ++i) {
    if (wave[i] != wave[begin]) begin = i;
    double clock = clock_of(starts[i], starts[begin], tiles.blocks);
    if (clock > double(tiles.blocks - h100::kSlack)) clock = 0;
    const size_t tile = size_t(some[i].tile);
    const auto late = static_cast<int64_t>(std::nearbyint(double(tiles.first[tile]) - clock));
    const int64_t backwards = std::min(std::max<int64_t>(late, 0), tiles.count[tile]);
    some[i].descending = backwards < h100::kSlack ? 0 : backwards;
  }
}

// The list in waves. Tiles that see nothing come first: the last wave is for tiles that can be
// split. The first wave begins with tiles that are there.
WorkTiles work_tiles_in_waves(const TileTable& tiles, const OrderShape& shape,
                              const double* there_at) {
  const Batches batches = batches_of(tiles);
  std::vector<Listed> listed = list_batches(batches, shape.heads_kv);
  if (there_at != nullptr && !listed.empty())
    put_first_there(
        listed, std::count(batches.batch.begin(), batches.batch.end(), batches.batch[0]), there_at);
  const int64_t ctas = shape.num_ctas, entries = listed.empty() ? 0 : listed.back().entry + 1,
                whole = std::max<int64_t>((entries + ctas - 1) / ctas - h100::kLastWaves, 0);
  const auto wave_of = [&](const Listed& x) { return std::min(x.entry / ctas, whole); };
  // In a wave first what its groups begin with; of that, and of all that is left at the end, the
  // longest first.
  std::stable_sort(listed.begin(), listed.end(), [&](const Listed& a, const Listed& b) {
    const int64_t of_a = wave_of(a), of_b = wave_of(b);
    if (of_a != of_b) return of_a < of_b;
    if (of_a < whole && a.side != b.side) return a.side < b.side;
    return tiles.count[size_t(a.tile)] > tiles.count[size_t(b.tile)];
  });
  WorkTiles made;
  Numbers waves;
  for (int64_t tile = 0; tile < tiles.size(); ++tile)
    for (int head = 0; tiles.count[size_t(tile)] == 0 && head < shape.heads_kv; ++head) {
      made.push_back({tile, head, 0});
      waves.push_back(-1);
    }
  for (const Listed& x : listed) {
    made.push_back({x.tile, x.head, 0});
    waves.push_back(wave_of(x));
  }
  set_descending(made, waves, tiles, shape.num_ctas);
  return made;
}

}  // namespace

int OrderShape::heads_at_once(int tiles) const {
  return heads_per_l2_group(tiles, heads_kv, 2ll * num_sms, 0);
}

// Those that start first wrap, the others ascend. The first L2 group may have an order of its own.
WorkTiles work_tiles_in_order(const TileTable& tiles, const OrderShape& shape, int at_once) {
  const int64_t num = tiles.size();
  const int parts =
      num_head_splits(shape.group, num * shape.heads_kv, 1, shape.group, shape.num_sms);
  WorkTiles made;
  for (int first = 0; first < shape.heads_kv; first += at_once) {
    const int32_t* order = first == 0 ? tiles.plan().first_order() : tiles.plan().order();
    const int end = std::min(first + at_once, shape.heads_kv);
    const size_t begin = made.size();
    for (int64_t i = 0; i < num; ++i)
      for (int head = first; head < end; ++head) {
        const bool is_early = int64_t(made.size() - begin) * parts < shape.num_ctas;
        made.push_back({order[i], head, is_early ? MAGI_TRAVERSAL_WRAP : 0});
      }
  }
  return made;
}

bool wants_waves(const TileTable& tiles, const OrderShape& shape) {
  int64_t aligned = 0;
  for (size_t i = 0; i < tiles.count.size(); ++i)
    aligned += tiles.is_aligned(i) ? tiles.count[i] : 0;
  const bool is_long = tiles.size() > shape.num_ctas && tiles.blocks < MAGI_TRAVERSAL_WRAP;
  return is_long && double(aligned) >= h100::kLeastAligned * double(sum_of(tiles.count));
}

WorkTiles list_work_tiles(const TileTable& tiles, const OrderShape& shape, const double* there_at) {
  WorkTiles made = work_tiles_in_order(tiles, shape, shape.heads_at_once(tiles.size()));
  if (wants_waves(tiles, shape) && share_out_of_step(made, tiles, shape) > h100::kMostOut)
    made = work_tiles_in_waves(tiles, shape, there_at);
  return made;
}

}  // namespace magi::schedule
