// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "magi/schedule.h"
#include "planner/schedule/plan_reader.h"

namespace magi::schedule {

// What a work list depends on besides the plan. `group` query heads share a kv head, a multiple of
// MAGI_LIST_SPLITS. What is split depends on `num_sms`, not on what is left free.
struct ListShape {
  int heads_kv, group, num_sms, num_ctas;
};

// The words of the work list, a magi_work_list, of a plan that is read in its m-blocks.
std::vector<int32_t> make_work_list(const PlanReader& plan, const ListShape& shape);

}  // namespace magi::schedule
