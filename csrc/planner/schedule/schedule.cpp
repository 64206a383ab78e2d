// SPDX-License-Identifier: Apache-2.0
// The one entry: what is chosen for a call, and its work tiles.
#include <cstring>
#include <exception>

#include "planner/schedule/choose.h"
#include "planner/schedule/splits.h"
#include "planner/schedule/work_list.h"
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

class Writer {
 public:
  Writer(const int32_t* plan, int64_t plan_words, int32_t* words, int64_t room)
      : plan_(plan), plan_words_(plan_words), words_(words), room_(room) {}

  // The plan with `rows` behind it; returns the words that these are in all.
  template <typename T>
  int64_t write(const std::vector<T>& rows) {
    const size_t bytes = rows.size() * sizeof(T);
    const int64_t all = plan_words_ + int64_t(bytes / 4);
    if (all > room_) return all;
    std::memcpy(words_, plan_, size_t(plan_words_) * 4);
    std::memcpy(words_ + plan_words_, rows.data(), bytes);
    is_written_ = true;
    return all;
  }
  // Where it is written: its header says that there are work tiles.
  void set_work_tiles() {
    if (is_written_) header().words_work_tiles = int32_t(plan_words_);
  }
  void set_order(const std::vector<int64_t>& order) {
    if (!is_written_) return;
    for (size_t i = 0; i < order.size(); ++i)
      words_[size_t(header().words_order) + i] = int32_t(order[i]);
  }

 private:
  magi_tile_plan_header& header() { return *reinterpret_cast<magi_tile_plan_header*>(words_); }

  const int32_t* plan_;
  int64_t plan_words_;
  int32_t* words_;
  int64_t room_;
  bool is_written_ = false;
};

int64_t write_work_tiles(const PlanReader& plan, const magi_schedule_problem& p, bool by_document,
                         const double* there_at, Writer writer) {
  const TileTable tiles(plan);
  const OrderShape shape{p.heads_kv, group_of(p), p.num_sms, p.num_ctas};
  const WorkTiles work_tiles =
      by_document          ? work_tiles_by_document(tiles, p.heads_kv)
      : p.keeps_plan_order ? work_tiles_in_order(tiles, shape, shape.heads_at_once(tiles.size()))
                           : list_work_tiles(tiles, shape, there_at);
  const int64_t needed = writer.write(rows_of(work_tiles, p.tail_work_tiles, p.tail_parts));
  writer.set_work_tiles();
  if (by_document) writer.set_order(document_order(tiles));
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
  const Writer writer(plan, plan_words, words, room);
  if (p.takes_list) {
    const PlanReader in_blocks(plan, choice->block_m);
    const magi_status status = check_list(in_blocks, p);
    if (status != MAGI_OK) return status;
    const ListShape shape{p.heads_kv, group_of(p), p.num_sms, p.num_ctas};
    *words_needed = Writer(writer).write(make_work_list(in_blocks, shape));
  } else {
    *words_needed = write_work_tiles(reader, p, choice->by_document != 0, there_at, writer);
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
