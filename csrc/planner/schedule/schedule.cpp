// SPDX-License-Identifier: Apache-2.0
// The one entry: what is chosen for a call, and its work tiles.
#include <cstring>
#include <exception>

#include "planner/schedule/splits.h"
#include "planner/schedule/work_tiles.h"
#include "planner/status.h"

namespace magi::schedule {
namespace {

// Rows of `magi_work_tile`. So many work tiles at the end are split, so that they do not leave most
// SMs idle: first parts of all, then second parts.
std::vector<magi_work_tile> rows_of(const WorkTiles& work_tiles, int tail, int parts) {
  std::vector<magi_work_tile> rows;
  const size_t whole = work_tiles.size() - size_t(tail);
  const auto add = [&](const WorkTile& w, int split, int num_splits, int partial) {
    rows.push_back({int32_t(w.tile), int32_t(w.head), split, num_splits, 0, INT_MAX,
                    int32_t(w.descending), partial});
  };
  for (size_t i = 0; i < whole; ++i) add(work_tiles[i], 0, 1, -1);
  for (int split = 0; split < parts; ++split)
    for (int i = 0; i < tail; ++i) add(work_tiles[whole + size_t(i)], split, parts, i);
  return rows;
}

// The plan with `rows` behind it, if there is room; returns the words that these are in all.
template <typename T>
int64_t write_behind(const int32_t* plan, int64_t plan_words, const std::vector<T>& rows,
                     int32_t* words, int64_t room) {
  const size_t bytes = rows.size() * sizeof(T);
  const int64_t all = plan_words + int64_t(bytes / 4);
  if (all > room) return all;
  std::memcpy(words, plan, size_t(plan_words) * 4);
  std::memcpy(words + plan_words, rows.data(), bytes);
  return all;
}

int64_t write_work_tiles(const PlanReader& plan, int64_t plan_words, const magi_schedule_problem& p,
                         bool by_document, const double* there_at, int32_t* words, int64_t room) {
  const TileTable tiles(plan);
  const OrderShape shape{p.heads_kv, group_of(p), p.num_sms, p.num_ctas};
  const WorkTiles work_tiles =
      by_document          ? work_tiles_by_document(tiles, p.heads_kv)
      : p.keeps_plan_order ? work_tiles_in_order(tiles, shape, shape.heads_at_once(tiles.size()))
                           : list_work_tiles(tiles, shape, there_at);
  const std::vector<magi_work_tile> rows = rows_of(work_tiles, p.tail_work_tiles, p.tail_parts);
  const int64_t needed = write_behind(plan.words(), plan_words, rows, words, room);
  if (needed > room) return needed;
  auto& header = *reinterpret_cast<magi_tile_plan_header*>(words);
  header.words_work_tiles = int32_t(plan_words);
  if (by_document) {
    const std::vector<int64_t> order = document_order(tiles);
    std::copy(order.begin(), order.end(), words + header.words_order);
  }
  return needed;
}

magi_status check_list(const PlanReader& plan, const magi_schedule_problem& p) {
  if (p.heads_kv < 1 || plan.block_m() < 1 || p.heads_q < p.heads_kv ||
      group_of(p) % MAGI_LIST_SPLITS != 0)
    return fail(
        MAGI_INVALID_ARGUMENT,
        "Give a transposed plan, a kv head or more of %d, %d, ... query heads, SMs, CTAs and "
        "block_m.",
        MAGI_LIST_SPLITS, 2 * MAGI_LIST_SPLITS);
  if (plan.num_tiles() < 1)
    return fail(MAGI_INVALID_ARGUMENT, "The plan has no tiles, so there is nothing to list.");
  return MAGI_OK;
}

magi_status make(const int32_t* plan, int64_t plan_words, const magi_schedule_problem& p,
                 magi_schedule_choice* choice, const double* there_at, int32_t* words, int64_t room,
                 int64_t* words_needed) {
  const PlanReader reader(plan, choice->block_m);
  if (p.kind == MAGI_FWD) {
    select_forward_splits(reader, p.head_units, p.num_sms, choice);
    return MAGI_OK;
  }
  if (choice->block_m == 0) *choice = choose(p, TileTable(reader));
  if (words == nullptr) return MAGI_OK;
  if (p.takes_list) {
    const PlanReader in_blocks(plan, choice->block_m);
    const magi_status status = check_list(in_blocks, p);
    if (status != MAGI_OK) return status;
    const OrderShape shape{p.heads_kv, group_of(p), p.num_sms, p.num_ctas};
    *words_needed = write_behind(plan, plan_words, make_work_list(in_blocks, shape), words, room);
  } else {
    *words_needed =
        write_work_tiles(reader, plan_words, p, choice->by_document, there_at, words, room);
  }
  if (room < *words_needed)
    return fail(MAGI_CAPACITY, "The schedule has %lld words and there is room for %lld.",
                static_cast<long long>(*words_needed), static_cast<long long>(room));
  return MAGI_OK;
}

}  // namespace
}  // namespace magi::schedule

extern "C" {

int64_t magi_schedule_room(const int32_t* plan, int64_t plan_words,
                           const magi_schedule_problem* problem) {
  if (plan == nullptr || problem == nullptr) return -1;
  const magi_schedule_problem& p = *problem;
  const auto& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  const int64_t tiles = header.num_tiles,
                more = int64_t(std::max(p.tail_parts, 1) - 1) * std::max(p.tail_work_tiles, 0);
  if (!p.takes_list) return plan_words + 8 * (tiles * p.heads_kv + more);
  // As many as a list has if half of its tiles are split.
  const int64_t parts = int64_t(MAGI_LIST_SPLITS) * p.heads_kv,
                blocks = (int64_t(header.total_k) + 63) / 64;  // the smallest m-blocks
  return plan_words + 64 + parts * (13 * tiles + 2 * (blocks + tiles)) +
         blocks * (1 + (tiles + 31) / 32);
}

magi_status magi_schedule(const int32_t* plan, int64_t plan_words,
                          const magi_schedule_problem* problem, magi_schedule_choice* choice,
                          const double* there_at, int32_t* words, int64_t room,
                          int64_t* words_needed) {
  if (plan == nullptr || problem == nullptr || choice == nullptr ||
      (words != nullptr && words_needed == nullptr))
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "Give a plan, a problem and a choice, and with words a place for how many are "
        "needed.");
  const magi_schedule_problem& p = *problem;
  const auto& header = *reinterpret_cast<const magi_tile_plan_header*>(plan);
  const int64_t work_tiles = int64_t(header.num_tiles) * p.heads_kv;
  if (p.num_sms < 1 || p.num_ctas < 1 || p.heads_kv < 0 || p.tail_work_tiles < 0 ||
      p.tail_work_tiles > work_tiles || p.tail_parts < 1 || choice->block_m < 0 ||
      (p.kind == MAGI_FWD && p.head_units < 1))
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "A schedule for %d SMs, %d CTAs, %d kv heads and %d split work tiles of %lld "
        "in %d parts: give an SM, a CTA, a part and a head or more, and split no more "
        "than there are.",
        p.num_sms, p.num_ctas, p.heads_kv, p.tail_work_tiles, static_cast<long long>(work_tiles),
        p.tail_parts);
  try {
    return magi::schedule::make(plan, plan_words, p, choice, there_at, words, room, words_needed);
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory for a schedule: %s.", error.what());
  }
}

}  // extern "C"
