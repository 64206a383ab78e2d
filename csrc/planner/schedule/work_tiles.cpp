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
#include <limits>

#include "planner/schedule/l2_groups.h"
#include "planner/schedule/simulate.h"

namespace magi::schedule {
namespace {

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

// Tiles that follow one another. The groups of a batch take about as long; those of batch -1 fill
// a round.
struct Group {
  std::vector<int64_t> tiles;
  int64_t batch;
};

// First the groups that fill a wave. Others belong to a batch with groups that miss up to two
// blocks less of a round.
std::vector<Group> groups_of(const TileTable& tiles) {
  std::vector<Group> best;
  double least = std::numeric_limits<double>::infinity();
  for (int beyond = 1; beyond <= h100::kMostBeyond; ++beyond) {
    std::vector<Group> some;
    int64_t loss = 0;
    for (std::vector<int64_t>& group : group_tiles(tiles.count, tiles.blocks + beyond)) {
      int64_t missing = tiles.blocks;
      for (int64_t tile : group) missing -= tiles.count[size_t(tile)];
      const bool is_filled = missing <= h100::kSlack;
      loss += is_filled ? std::abs(missing) : h100::kUnfilled;
      some.push_back({std::move(group), is_filled ? -1 : missing});
    }
    const double mean = double(loss) / double(std::max<size_t>(some.size(), 1));
    if (mean >= least) continue;
    least = mean;
    best = std::move(some);
  }
  std::stable_sort(best.begin(), best.end(), [](const Group& a, const Group& b) {
    return a.batch != b.batch ? a.batch < b.batch : a.batch >= 0 && a.tiles[0] < b.tiles[0];
  });
  for (size_t g = 1; g < best.size(); ++g)
    if (best[g - 1].batch >= 0 && best[g].batch <= best[g - 1].batch + 2)
      best[g].batch = best[g - 1].batch;
  return best;
}

// A tile and head, the number of the entry, which is a group and a head, and which of the group it
// is.
struct Listed {
  int64_t tile, head, entry, side;
};

// Batch by batch, in each head by head, the groups one after the other. Of the first batch and head
// what is there comes first, if something arrives: of each group, and groups in that order.
std::vector<Listed> list_groups(const std::vector<Group>& groups, int heads,
                                const double* there_at) {
  std::vector<Listed> made;
  int64_t entry = 0;
  for (auto from = groups.begin(), to = from; from != groups.end(); from = to) {
    to = std::find_if(from, groups.end(), [&](const Group& g) { return g.batch != from->batch; });
    for (int head = 0; head < heads; ++head) {
      std::vector<Group> some(from, to);
      if (there_at != nullptr && entry == 0) {
        const auto is_earlier = [&](int64_t a, int64_t b) { return there_at[a] < there_at[b]; };
        for (Group& g : some) std::stable_sort(g.tiles.begin(), g.tiles.end(), is_earlier);
        std::stable_sort(some.begin(), some.end(), [&](const Group& a, const Group& b) {
          return is_earlier(a.tiles[0], b.tiles[0]);
        });
      }
      for (const Group& g : some) {
        for (size_t side = 0; side < g.tiles.size(); ++side)
          made.push_back({g.tiles[side], head, entry, int64_t(side)});
        ++entry;
      }
    }
  }
  return made;
}

// How many blocks each takes backwards: as many as the clock is behind its first one, by the time
// at which the first work tile of its wave starts.
void set_descending(WorkTiles& some, const std::vector<int64_t>& wave, const TileTable& tiles,
                    int num_ctas) {
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
  std::vector<Listed> listed = list_groups(groups_of(tiles), shape.heads_kv, there_at);
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
  std::vector<int64_t> waves;
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
      num_head_splits(shape.group, num * shape.heads_kv, 1, shape.group, shape.num_sms, true);
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
