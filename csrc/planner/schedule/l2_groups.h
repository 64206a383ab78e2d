// SPDX-License-Identifier: Apache-2.0
// How many work tiles are enough, among how many the query heads of a tile are shared out, and how
// many heads form an L2 group. The planner and the launch code of the kernels read the same rules.
#pragma once

#include <algorithm>
#include <cstdint>

#include "planner/schedule/heuristics_h100.h"

namespace magi {

// How many whole work tiles are enough: nearly two for each SM. With fewer the query heads of each
// tile are split.
constexpr int enough_work_tiles(int num_sms) { return 19 * num_sms / 10; }

// Among how many work tiles the query heads of a tile are shared out, `group` of a kv head: as few
// as make enough of `work_tiles` whole ones, but no fewer than `least` and no more than `most`. All
// have the same number of heads if `is_even`; else the first may have one more.
inline int num_head_splits(int group, int64_t work_tiles, int least, int most, int num_sms,
                           bool is_even) {
  int splits = 1;
  for (int parts = 1; parts <= group && parts <= most; ++parts) {
    if (is_even && group % parts != 0) continue;
    splits = parts;
    if (parts >= least && work_tiles * parts >= enough_work_tiles(num_sms)) break;
  }
  return splits;
}

// The kv heads of an L2 group: as many as have `at_once` work tiles together, `tiles` of each head.
// With two for each SM the heaviest tiles, one for each SM, are half of the group. If that makes
// two groups, they get the same number of heads, or the long tiles of a small second group would
// end alone. A small last group is allowed where all of it is among the `tail` work tiles, which
// are split.
inline int heads_per_l2_group(int64_t tiles, int heads_kv, int64_t at_once, int64_t tail) {
  if (tiles == 0) return heads_kv;
  const int64_t heads =
      std::min<int64_t>(std::max<int64_t>((at_once + tiles / 2) / tiles, 1), heads_kv);
  const int64_t small = heads_kv % heads * tiles,
                l2_groups = (tiles * heads_kv + at_once / 2) / at_once;
  if (l2_groups > 2 || (small > 0 && small <= tail)) return static_cast<int>(heads);
  return l2_groups < 2 ? heads_kv : (heads_kv + 1) / 2;
}

// The same in deterministic order, where the query heads of a tile are in `parts` work tiles of
// `heads_of_part` each. With one or two query heads in a work tile the group is twice as large, as
// long as all its work tiles can descend: those that begin together at the same blocks wait for
// each other, and with twice the heads half as many do (docs/log/ffa_backward_turns.md).
inline int heads_per_l2_group_deterministic(int64_t tiles, int heads_kv, int parts,
                                            int heads_of_part, int num_sms) {
  if (heads_of_part <= kLargeL2Groups) {
    const int heads = heads_per_l2_group(tiles * parts, heads_kv, 4ll * num_sms, 0);
    if (num_sms / (heads * parts) >= kManyTiles * heads_of_part) return heads;
  }
  return heads_per_l2_group(tiles * parts, heads_kv, 2ll * num_sms, 0);
}

// Portable kernels: head units whose tiles come first, the heaviest of all before the others. As
// many as have a work tile for each SM, but some at least. What they read and add to stays in L2.
// In deterministic order all, so that few tiles of a head are in progress at once.
inline int portable_units_per_l2_group(int num_tiles, int head_units, bool is_deterministic,
                                       int num_sms) {
  const int units = std::max((num_sms + num_tiles - 1) / num_tiles, kLeastPortableUnits);
  return is_deterministic ? head_units : std::min(units, head_units);
}

}  // namespace magi
