// SPDX-License-Identifier: Apache-2.0
// What is chosen for a call: what is split so that all SMs end together, how many queries an
// m-block has, how dq is stored.
#pragma once

#include "magi/schedule.h"
#include "planner/schedule/tile_table.h"

namespace magi::schedule {

// The schedule of a backward.
magi_schedule_choice choose(const magi_schedule_problem& p, const TileTable& tiles);

// The fastest m-block of a call without softcap and dropout: 64, or where that is faster 80 or 128.
int select_block_m(const magi_schedule_problem& p, const TileTable& tiles, bool is_deterministic);

// 2 where halves of the query heads of all tiles end sooner by enough, else 0: as few parts as the
// library chooses. In deterministic order.
int select_halves(const magi_schedule_problem& p, const TileTable& tiles);
// With atomic dq: into how many parts the query heads of all tiles are split; 0 likewise.
int select_head_splits(const magi_schedule_problem& p, const TileTable& tiles);

// The same, so that all SMs end together, where there is no work list: work tiles are few, or the
// query heads cannot be listed in equal parts. Parts may differ by one head. Whole work tiles of
// causal documents stay whole: CTAs that begin together read the same m-blocks (docs/log/heads.md).
int select_balanced_head_splits(const magi_schedule_problem& p, const TileTable& tiles, int block_m,
                                bool by_document);

// Tiles from `begin` to before `end`, in the order of the plan, whose query heads are split into so
// many parts; all 0 for none.
struct TileSplit {
  int begin = 0, end = 0, parts = 0;
};
// Whether there is a kernel for parts of so many query heads of a kv head.
bool can_split(int group);
// In m-blocks of 80, in deterministic order; none where whole tiles in m-blocks of `block_m` take
// about as long.
TileSplit select_tile_split(const magi_schedule_problem& p, const TileTable& tiles, int block_m);

// Splits of a forward along the keys, into `choice`: the first `split_end` tiles of the order into
// at most `num_splits` parts, of at least `min_blocks` key blocks; all 0 for none.
void select_forward_splits(const PlanReader& plan, int head_units, int num_sms,
                           magi_schedule_choice* choice);

inline int group_of(const magi_schedule_problem& p) { return p.heads_q / std::max(p.heads_kv, 1); }
inline int dim_of(const magi_schedule_problem& p) { return std::max(p.head_dim, p.head_dim_v); }
inline int64_t tiles_of(int64_t keys) { return (keys + kTile - 1) / kTile; }

}  // namespace magi::schedule
