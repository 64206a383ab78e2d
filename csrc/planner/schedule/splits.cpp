// SPDX-License-Identifier: Apache-2.0
#include "planner/schedule/splits.h"

#include <cmath>
#include <set>

#include "planner/schedule/l2_groups.h"
#include "planner/schedule/simulate.h"
#include "planner/schedule/work_tiles.h"

namespace magi::schedule {
namespace {

constexpr int kMostForwardParts = 16;  // of a work tile, as in csrc/ffa/common/part.cuh: kMaxParts
constexpr int kTileParts[] = {2, 4, 8};

// m-blocks of 80 may have so many times the queries that those of 64 have; 0: never.
double most_of_wide(const magi_schedule_problem& p, int64_t work_tiles, bool is_deterministic) {
  const bool is_whole = work_tiles >= enough_work_tiles(p.num_sms);
  if (is_deterministic && is_whole) return h100::kMostDeterministic;
  if (!is_deterministic && work_tiles >= h100::kManyWorkTiles * p.num_sms) return h100::kMostOfMany;
  if (dim_of(p) <= h100::kFewDim) return 0;
  if (p.area >= int64_t(h100::kLongOfFew) * std::max(p.total_k, 1)) return h100::kMostOfFewLong;
  return is_whole ? h100::kMostOfFew : 0;
}

// The query heads of one of so many parts, if these are a power of two; else 0.
int heads_of_part(int group, int parts) {
  const int heads = group / parts;
  return heads * parts == group && (heads & (heads - 1)) == 0 ? heads : 0;
}

// Steps of all query heads of a kv head in m-blocks of so many queries, in the order of the plan.
std::vector<double> group_steps(const TileTable& tiles, int queries, double group) {
  const std::vector<int64_t> by_tile = tiles.steps(queries);
  std::vector<double> made;
  for (int i = 0; i < tiles.size(); ++i)
    made.push_back(double(by_tile[size_t(tiles.plan().order()[i])]) * group);
  return made;
}

// When the last work tile ends, of tiles that take so many steps, in the order of the plan.
double end_of_tiles(const std::vector<double>& steps, const TileSplit& split, int heads_kv,
                    double begin_and_end, int num_sms) {
  std::vector<double> times;
  for (int i = 0; i < int(steps.size()); ++i) {
    const int parts = i >= split.begin && i < split.end ? split.parts : 1;
    times.insert(times.end(), size_t(parts * heads_kv), steps[size_t(i)] / parts + begin_and_end);
  }
  return end_of(times, num_sms);
}

// Tiles whose work tiles are taken in the order of the plan. `steps` of all query heads of a kv
// head, in steps of 80 queries; `rows`: what the kernels before and behind take.
struct SimulatedTiles {
  std::vector<double> steps;
  int heads_kv, num_sms;
  double rows;

  // What it takes if all SMs end together.
  double least() const {
    const double sum = sum_of(steps) + h100::kTileSplitBeginAndEnd * double(steps.size());
    return sum * heads_kv / num_sms + rows;
  }
  double time(const TileSplit& split) const {
    const int parts = (split.end - split.begin) * split.parts * heads_kv;
    const double all = least(),
                 end = end_of_tiles(steps, split, heads_kv, h100::kTileSplitBeginAndEnd, num_sms);
    return all + h100::kLateShare * (end + rows - all) + h100::kPart * parts;
  }
};

std::vector<TileSplit> runs_of(int tiles, int group) {
  std::set<int> first, edges;
  for (int i = 0; i <= std::min(h100::kFirstTiles, tiles); ++i) first.insert(i);
  edges = first;
  for (int i = 0; i <= h100::kEdges; ++i)
    edges.insert(int(std::nearbyint(i * (double(tiles) / h100::kEdges))));
  std::vector<TileSplit> runs;
  for (int parts : kTileParts) {
    if (!heads_of_part(group, parts)) continue;
    const std::set<int>& places = parts <= h100::kMostInPairs ? edges : first;
    for (auto begin = places.begin(); begin != places.end(); ++begin)
      for (auto end = std::next(begin); end != places.end(); ++end)
        runs.push_back({*begin, *end, parts});
  }
  return runs;
}

// When the last work tile ends that has one of so many parts of the query heads, and what the parts
// take in memory; in steps. `steps` of each tile for one query head.
double end_in_parts(const std::vector<int64_t>& steps, const WorkTiles& order, int group, int parts,
                    int num_sms) {
  std::vector<double> times;
  times.reserve(order.size() * size_t(parts));
  for (const WorkTile& w : order)
    for (int part = 0; part < parts; ++part) {
      const int heads = group / parts + (part < group % parts ? 1 : 0);
      times.push_back(double(steps[size_t(w.tile)] * heads) + h100::kSplitBeginAndEnd);
    }
  const double in_memory = parts > 1 ? h100::kHeadPart * parts * double(order.size()) : 0;
  return end_of(times, num_sms) + in_memory;
}

// Partial sums of dk and dv take no more memory than those of dq.
int64_t most_parts_in_memory(const magi_schedule_problem& p) {
  return int64_t(p.total_q) * p.heads_q / (2 * int64_t(p.local_k) * p.heads_kv);
}

}  // namespace

int select_block_m(const magi_schedule_problem& p, const TileTable& tiles, bool is_deterministic) {
  const int dim = dim_of(p);
  const int64_t work_tiles = tiles_of(p.total_k) * p.heads_kv;
  const int larger = dim > 64 ? kWide : kWidest;
  const double most = dim > 64           ? most_of_wide(p, work_tiles, is_deterministic)
                      : is_deterministic ? 0
                                         : h100::kMostOfSmallDims;
  if (dim > 128 || most == 0 || p.total_q == 0) return kNarrow;
  const int64_t queries = sum_of(tiles.steps(larger)) * larger;
  return queries > 0 && double(queries) <= most * double(sum_of(tiles.steps(kNarrow))) * kNarrow
             ? larger
             : kNarrow;
}

// By default there are about two work tiles for each SM. That is enough where tiles are alike, and
// with atomic dq the host splits single uneven tiles (work_list.cpp). With deterministic dq a few
// long tiles would be waited for. Where single tiles can be split, that is better: with m-blocks of
// 80 and groups of 2, 4, 8 ... query heads. For other calls half of the heads in every work tile
// helps, but the halves of dk and dv pass through memory. Where one tile takes more than an even
// share, as of causal documents, halves were measured to be no faster.
int select_halves(const magi_schedule_problem& p, const TileTable& tiles) {
  const int group = group_of(p);
  if (dim_of(p) > h100::kMostSplitDim || p.local_k == 0 || p.heads_kv == 0 ||
      p.heads_q % (2 * p.heads_kv) != 0)
    return 0;
  const int64_t work_tiles = tiles_of(p.local_k) * p.heads_kv;
  if (work_tiles < enough_work_tiles(p.num_sms) || work_tiles >= h100::kManyWorkTiles * p.num_sms)
    return 0;
  const std::vector<double> steps = group_steps(tiles, kNarrow, group);
  const double most = steps.empty() ? 0 : *std::max_element(steps.begin(), steps.end());
  if (most * p.num_sms > sum_of(steps) * p.heads_kv) return 0;
  const auto end = [&](int parts) {
    return end_of_tiles(steps, {0, tiles.size(), parts}, p.heads_kv, h100::kSplitBeginAndEnd,
                        p.num_sms);
  };
  return end(2) <= h100::kHalvesGain * end(1) ? 2 : 0;
}

// Tiles are split where they have many segments, since CTAs are at different blocks of queries then
// and fewer heads at a time help; or where a few are so long that those of the last kv heads would
// end alone (docs/log/sparse.md).
int select_head_splits(const magi_schedule_problem& p, const TileTable& tiles) {
  const int group = group_of(p);
  const int64_t num = tiles_of(p.local_k);
  if (dim_of(p) > h100::kMostSplitDim || group < 4 ||
      num * p.heads_kv < enough_work_tiles(p.num_sms))
    return 0;
  const std::vector<int64_t> steps = tiles.steps(kNarrow);
  int64_t most_steps = 0;
  for (int64_t n : steps) most_steps = std::max(most_steps, n);
  // The longest tiles of the last L2 group begin when the groups before it end.
  const double longest = double(most_steps * group),
               share = double(sum_of(steps) * p.heads_q) / p.num_sms;
  const auto end = [&](int parts) {
    const double at_last =
        double(heads_per_l2_group(num * parts, p.heads_kv, 2ll * p.num_sms, 0)) / p.heads_kv;
    return std::max(share, (1 - at_last) * share + longest / parts);
  };
  const int least = tiles.mean_segments() >= kManySegments ? 2 : 1;
  if (least == 1 && end(1) <= h100::kAlone * share) return 0;
  const auto most = std::min<int64_t>(group / 2, most_parts_in_memory(p));
  int last = 0;
  for (int parts = least; parts <= most; ++parts) {
    if (group % parts != 0) continue;
    last = parts;
    if (end(parts) <= h100::kEnough * share) break;
  }
  return last > 1 ? last : 0;
}

int select_balanced_head_splits(const magi_schedule_problem& p, const TileTable& tiles, int block_m,
                                bool by_document) {
  const int group = group_of(p);
  const int64_t work_tiles = tiles_of(p.local_k) * p.heads_kv,
                enough = enough_work_tiles(p.num_sms);
  if (dim_of(p) > h100::kMostSplitDim || work_tiles == 0) return 0;
  const bool takes_list =
      group % MAGI_LIST_SPLITS == 0 && work_tiles < h100::kManyWorkTiles * p.num_sms;
  if (work_tiles >= enough && (takes_list || p.is_all_causal)) return 0;
  const int by_library = num_head_splits(group, work_tiles, 1, group, p.num_sms, true);
  const auto in_memory = std::min<int64_t>(group, most_parts_in_memory(p)),
             most = std::min(std::max<int64_t>(by_library, in_memory),
                             h100::kMostBalanced * p.num_sms / work_tiles);
  if (most < 2) return 0;
  const std::vector<int64_t> steps = tiles.steps(block_m);
  // Work tiles of m-blocks of 80 are listed whole; the kernel makes L2 groups of parts of others.
  const OrderShape shape{p.heads_kv, group, p.num_sms, p.num_ctas};
  const auto end_of_parts = [&](int parts) {
    const int at_once = shape.heads_at_once(tiles.size() * (block_m == kWide ? 1 : parts));
    return end_in_parts(steps,
                        by_document ? work_tiles_by_document(tiles, p.heads_kv)
                                    : work_tiles_in_order(tiles, shape, at_once),
                        group, parts, p.num_sms);
  };
  int chosen = 0;
  double sooner = h100::kBalancedGain * end_of_parts(by_library);
  for (int parts = 2; parts <= most; ++parts) {
    if (work_tiles * parts < enough && parts < group) continue;
    const double end = end_of_parts(parts);
    if (end >= sooner) continue;
    chosen = parts;
    sooner = end;
  }
  return chosen;
}

bool can_split(int group) {
  for (int parts : kTileParts)
    if (heads_of_part(group, parts)) return true;
  return false;
}

// Where there are about two work tiles for each SM, documents of different lengths leave some SMs
// idle at the end (docs/log/ffa_backward_turns.md). A simulation chooses the run and the number of
// parts. Not where a slice is not full: tiles that end at a diagonal wait for each other, and parts
// of them were slower in 27 of 31 measurements.
TileSplit select_tile_split(const magi_schedule_problem& p, const TileTable& tiles, int block_m) {
  if (p.has_diagonal) return {};
  const int group = group_of(p);
  const double rows = double(int64_t(p.total_q) * p.heads_q) / h100::kRows;
  const SimulatedTiles wide{group_steps(tiles, kWide, group), p.heads_kv, p.num_sms, rows};
  SimulatedTiles whole = wide;
  if (block_m == kNarrow) whole.steps = group_steps(tiles, kNarrow, group * h100::kNarrowStep);
  const double limit = h100::kSplitGain * whole.time({});
  if (wide.least() > limit) return {};
  TileSplit best;
  double best_time = 0;
  for (const TileSplit& split : runs_of(tiles.size(), group)) {
    const double time = wide.time(split);
    if (best.parts && time >= best_time) continue;
    best = split;
    best_time = time;
  }
  return best_time <= limit ? best : TileSplit{};
}

// Those work tiles are split that take longer than an SM's share of the whole: a few queries that
// see all keys, beside many that see few, would keep some SMs busy long after the others. Work
// tiles of one mask are equal for all heads, so what is split is a prefix of the plan's order,
// which goes by cost. None where all tiles together are so few that the kernel splits each of them
// alike, which is as good; nor where the parts cost more key blocks than they save, as under a
// short causal mask.
void select_forward_splits(const PlanReader& plan, int head_units, int num_sms,
                           magi_schedule_choice* choice) {
  if (plan.num_tiles() == 0) return;
  int64_t sum = 0;
  for (int tile = 0; tile < plan.num_tiles(); ++tile) sum += plan.num_key_blocks(tile);
  const double share = std::max(double(sum * head_units) / num_sms, double(h100::kLeastBlocks));
  const int64_t tile_units = int64_t(plan.num_tiles()) * head_units;
  const int64_t parts_of_all =
      std::max<int64_t>(std::min<int64_t>(kMostForwardParts, num_sms / tile_units), 1);
  const int longest = plan.num_key_blocks(plan.order()[0]);
  if (double(longest) / double(parts_of_all) <= h100::kLong * share) return;
  // Small, so that they end together.
  const int least = std::max(int(share / 4), h100::kLeastBlocks);
  int tiles = 0;
  for (int tile = 0; tile < plan.num_tiles(); ++tile)
    tiles += plan.num_key_blocks(tile) > h100::kLong * share;
  tiles = std::min(tiles, h100::kMostForwardSplit / head_units);
  const int parts = std::min(kMostForwardParts, longest / least);
  if (tiles == 0 || parts <= 1) return;
  int in_all = 0;
  for (int i = 0; i < tiles; ++i)
    in_all += std::clamp(plan.num_key_blocks(plan.order()[i]) / least, 1, parts) * head_units;
  const double end = std::max(h100::kSplitEnd * share, double(longest) / parts);
  if (longest - end < h100::kSplitCall + h100::kSplitPart * in_all) return;
  choice->split_end = tiles;
  choice->num_splits = parts;
  choice->min_blocks = least;
}

}  // namespace magi::schedule
