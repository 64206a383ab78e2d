// SPDX-License-Identifier: Apache-2.0
// The work tiles of a backward in the order in which CTAs take them, and whether documents go one
// after the other.
#pragma once

#include <vector>

#include "magi/schedule.h"
#include "planner/schedule/tile_table.h"

namespace magi::schedule {

// `descending` blocks of each segment come first, from its end; MAGI_TRAVERSAL_WRAP: as many as
// there are before the segment.
struct WorkTile {
  int64_t tile, head, descending;
};
using WorkTiles = std::vector<WorkTile>;

// What the order depends on besides the plan. `group` query heads share a kv head. What is split
// depends on `num_sms`, not on what is left free.
struct OrderShape {
  int heads_kv, group, num_sms, num_ctas;
  int heads_at_once(int tiles) const;  // kv heads of an L2 group
};

// In L2 groups of so many heads, in each the costliest tiles first.
WorkTiles work_tiles_in_order(const TileTable& tiles, const OrderShape& shape, int at_once);
// Whether tiles may go in waves, in step with a clock: see work_tiles.cpp.
bool wants_waves(const TileTable& tiles, const OrderShape& shape);
// The faster of the plan's own order and waves. `there_at` (tiles,) says in which order the keys of
// tiles arrive while the kernel runs; nullptr: they are there.
WorkTiles list_work_tiles(const TileTable& tiles, const OrderShape& shape, const double* there_at);

// One document after the other.
WorkTiles work_tiles_by_document(const TileTable& tiles, int heads);
// Tiles in that order: those that see nothing, then the longest document first, in each the longest
// tile.
std::vector<int64_t> document_order(const TileTable& tiles);
// By how much it is faster to take work tiles by document than in L2 groups of `at_once` heads, as
// a logarithm; -1.0 where there is no estimate.
double gain_by_document(const TileTable& tiles, const OrderShape& shape, int at_once);

// The words of the work list, a magi_work_list, of a plan that is read in its m-blocks. `group` is
// a multiple of MAGI_LIST_SPLITS.
std::vector<int32_t> make_work_list(const PlanReader& plan, const OrderShape& shape);

}  // namespace magi::schedule
