// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "magi/schedule.h"
#include "planner/schedule/tile_table.h"

namespace magi::schedule {

// The schedule of a backward: size of its m-blocks, how dq is stored, splits, order of documents.
magi_schedule_choice choose(const magi_schedule_problem& p, const TileTable& tiles);

}  // namespace magi::schedule
