// SPDX-License-Identifier: Apache-2.0
// Checks a schedule against its plan. It shares nothing with what makes schedules but the reader of
// plans.
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <vector>

#include "magi/schedule.h"
#include "planner/schedule/plan_reader.h"
#include "planner/status.h"

namespace magi::schedule {
namespace {

// A schedule that is not right, as a sentence.
struct Fault {
  char text[256];
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void fault(const char* format, ...) {
  Fault made;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(made.text, sizeof(made.text), format, arguments);
  va_end(arguments);
  throw made;
}

void check_once(const char* what, const int32_t* numbers, int64_t count) {
  std::vector<char> seen(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] < 0 || numbers[i] >= count || seen[size_t(numbers[i])])
      fault("%s has %d at %lld: each of %lld must be there once.", what, numbers[i], (long long)i,
            (long long)count);
    seen[size_t(numbers[i])] = 1;
  }
}

using Rows = std::vector<const magi_work_tile*>;

class Checker {
 public:
  Checker(const PlanReader& plan, int heads_kv) : plan_(plan), heads_kv_(heads_kv) {}

  void check_orders() const {
    check_once("The order of tiles", plan_.order(), plan_.num_tiles());
    check_once("The first order of tiles", plan_.first_order(), plan_.num_tiles());
  }

  // Returns the rows of each partial.
  std::map<int, Rows> check_work_tiles(const magi_work_tile* rows, int64_t count) const {
    std::map<std::pair<int, int>, Rows> by_tile;
    std::map<int, Rows> by_partial;
    for (int64_t i = 0; i < count; ++i) {
      const magi_work_tile& w = rows[i];
      if (w.tile < 0 || w.tile >= plan_.num_tiles() || w.head_kv < 0 || w.head_kv >= heads_kv_ ||
          w.num_splits < 1 || w.split < 0 || w.split >= w.num_splits || w.m_begin < 0 ||
          w.m_begin >= w.m_end || w.num_descending < 0 || w.num_descending > MAGI_TRAVERSAL_WRAP)
        fault(
            "Work tile %lld is tile %d of kv head %d, part %d of %d, m-blocks %d to %d, %d of "
            "them descending: there is no such work tile.",
            (long long)i, w.tile, w.head_kv, w.split, w.num_splits, w.m_begin, w.m_end,
            w.num_descending);
      const bool is_whole = w.num_splits == 1 && w.m_begin == 0 && w.m_end == INT_MAX;
      if (is_whole ? w.partial != -1 : w.partial < 0)
        fault("Work tile %lld has partial %d: one that is whole has -1, one that is not a number.",
              (long long)i, w.partial);
      by_tile[{w.tile, w.head_kv}].push_back(&w);
      if (!is_whole) by_partial[w.partial].push_back(&w);
    }
    for (int tile = 0; tile < plan_.num_tiles(); ++tile)
      for (int head = 0; head < heads_kv_; ++head) check_cover(tile, head, by_tile[{tile, head}]);
    int next = 0;
    for (const auto& [partial, of_it] : by_partial) {
      if (partial != next++) fault("There is no partial %d, but there is %d.", next - 1, partial);
      for (const magi_work_tile* w : of_it)
        if (w->tile != of_it[0]->tile || w->head_kv != of_it[0]->head_kv ||
            by_tile[{w->tile, w->head_kv}].size() != of_it.size())
          fault("Partial %d is shared by work tiles of different tiles or kv heads.", partial);
    }
    return by_partial;
  }

 private:
  // Each query head and m-block once; a tile that sees nothing has a work tile, too, for its zeros.
  void check_cover(int tile, int head, const Rows& rows) const {
    int first = INT_MAX, end = 0, parts = 1;
    for (int i = 0; i < plan_.num_segments(tile); ++i) {
      const Blocks b = plan_.blocks(tile, i);
      first = std::min(first, b.first);
      end = std::max(end, b.end);
    }
    if (first >= end) first = 0, end = 1;
    for (const magi_work_tile* w : rows) parts = std::max(parts, w->num_splits);
    for (int part = 0; part < parts; ++part) {
      std::vector<int> count(size_t(end - first));
      for (const magi_work_tile* w : rows) {
        if (parts % w->num_splits != 0)
          fault("Tile %d of kv head %d is split into %d and into %d parts.", tile, head, parts,
                w->num_splits);
        if (part / (parts / w->num_splits) != w->split) continue;
        for (int b = std::max(w->m_begin, first); b < std::min(w->m_end, end); ++b)
          ++count[size_t(b - first)];
      }
      for (int b = first; b < end; ++b)
        if (count[size_t(b - first)] != 1)
          fault("m-block %d is in %d work tiles of part %d of tile %d and kv head %d.", b,
                count[size_t(b - first)], part, tile, head);
    }
  }

  const PlanReader& plan_;
  int heads_kv_;
};

// What kernels count by, of a work list.
class ListChecker {
 public:
  ListChecker(const PlanReader& plan, const int32_t* list, int64_t num_words, int heads_kv)
      : plan_(plan),
        list_(list),
        num_words_(num_words),
        header_(*reinterpret_cast<const magi_work_list*>(list)),
        heads_kv_(heads_kv),
        parts_(heads_kv * MAGI_LIST_SPLITS) {}

  void check(const Checker& checker) const {
    if (header_.words_total != num_words_)
      fault("The work list says that it has %d words; it has %lld.", header_.words_total,
            (long long)num_words_);
    const auto* rows = array<magi_work_tile>(header_.words_work_tiles, header_.num_work_tiles);
    const std::map<int, Rows> by_partial = checker.check_work_tiles(rows, header_.num_work_tiles);
    check_partials(by_partial);
    check_left(rows);
    check_once("The order of m-blocks", array<int32_t>(header_.words_blocks, plan_.num_m_blocks()),
               plan_.num_m_blocks());
    check_tiles_of_blocks();
    check_entries();
  }

 private:
  template <typename T>
  const T* array(int at, int64_t count) const {
    if (at % 4 != 0 || at < 16 || count < 0 || at + count * int64_t(sizeof(T) / 4) > num_words_)
      fault("An array of the work list lies at words %d and has %lld entries, of %lld words.", at,
            (long long)count, (long long)num_words_);
    return reinterpret_cast<const T*>(list_ + at);
  }

  void check_partials(const std::map<int, Rows>& by_partial) const {
    const auto* partials = array<magi_partial>(header_.words_partials, header_.num_partials);
    if (int64_t(by_partial.size()) != header_.num_partials ||
        header_.num_partials > (plan_.num_tiles() + 1) / 2 * heads_kv_)
      fault("There are %d partials, %lld of work tiles, and room for half of the tiles.",
            header_.num_partials, (long long)by_partial.size());
    for (const auto& [i, rows] : by_partial) {
      const magi_partial& p = partials[i];
      if (p.tile != rows[0]->tile || p.head_kv != rows[0]->head_kv ||
          p.num_splits != int(rows.size()))
        fault("Partial %d is of tile %d, kv head %d, %d parts; its work tiles are others.", i,
              p.tile, p.head_kv, p.num_splits);
    }
  }

  // How many work tiles each part of each tile has, and which tiles visit each m-block.
  void check_left(const magi_work_tile* rows) const {
    std::vector<int32_t> want(size_t(plan_.num_tiles()) * size_t(parts_));
    for (int i = 0; i < header_.num_work_tiles; ++i)
      for (int part = 0; part < MAGI_LIST_SPLITS; ++part)
        if (part / (MAGI_LIST_SPLITS / rows[i].num_splits) == rows[i].split)
          ++want[size_t(rows[i].tile) * size_t(parts_) +
                 size_t(rows[i].head_kv * MAGI_LIST_SPLITS + part)];
    check_equal("The numbers of work tiles that parts have", header_.words_left, want);
  }
  void check_tiles_of_blocks() const {
    const auto words = size_t(plan_.num_tiles() + 31) / 32;
    if (size_t(header_.tile_words) != words)
      fault("%d tiles need %d words of bits, not %d.", plan_.num_tiles(), int(words),
            header_.tile_words);
    std::vector<int32_t> want(size_t(plan_.num_m_blocks()) * words);
    for (int tile = 0; tile < plan_.num_tiles(); ++tile)
      for (int i = 0; i < plan_.num_segments(tile); ++i)
        for (int block = plan_.blocks(tile, i).first; block < plan_.blocks(tile, i).end; ++block)
          want[size_t(block) * words + size_t(tile / 32)] |= int32_t(1u << tile % 32);
    check_equal("The tiles of m-blocks", header_.words_tiles_of_block, want);
  }
  void check_equal(const char* what, int at, const std::vector<int32_t>& want) const {
    const int32_t* found = array<int32_t>(at, int64_t(want.size()));
    for (size_t i = 0; i < want.size(); ++i)
      if (found[i] != want[i])
        fault("%s: word %lld is %d in place of %d.", what, (long long)i, found[i], want[i]);
  }

  // Each part of each m-block, and each share of each partial, once.
  void check_entries() const {
    const auto* entries = array<magi_list_entry>(header_.words_entries, header_.num_entries);
    std::set<std::pair<int, int>> seen;
    for (int i = 0; i < header_.num_entries; ++i) {
      const magi_list_entry& e = entries[i];
      const bool is_partial = e.block < 0;
      if ((is_partial ? ~e.block >= header_.num_partials : e.block >= plan_.num_m_blocks()) ||
          e.part < 0 || e.part >= (is_partial ? MAGI_LIST_SPLITS : parts_) ||
          !seen.insert({e.block, e.part}).second)
        fault("Entry %d is block %d, part %d: that is not there, or twice.", i, e.block, e.part);
    }
    const int64_t want =
        int64_t(plan_.num_m_blocks()) * parts_ + int64_t(header_.num_partials) * MAGI_LIST_SPLITS;
    if (header_.num_entries != want)
      fault("There are %d entries and %lld parts.", header_.num_entries, (long long)want);
  }

  const PlanReader& plan_;
  const int32_t* list_;
  int64_t num_words_;
  const magi_work_list& header_;
  int heads_kv_, parts_;
};

void check_schedule(const int32_t* words, int64_t num_words, int64_t list_at, int heads_kv,
                    int block_m) {
  const PlanReader plan(words, block_m);
  const Checker checker(plan, heads_kv);
  checker.check_orders();
  if (list_at) {
    if (list_at < 28 || num_words - list_at < 16)
      fault("A work list at word %lld of %lld has no header.", (long long)list_at,
            (long long)num_words);
    ListChecker(plan, words + list_at, num_words - list_at, heads_kv).check(checker);
    return;
  }
  const int64_t at = plan.header().words_work_tiles;
  if (at < 28 || (num_words - at) % 8 != 0)
    fault("Work tiles begin at word %lld of %lld: there are none, or part of one.", (long long)at,
          (long long)num_words);
  checker.check_work_tiles(reinterpret_cast<const magi_work_tile*>(words + at),
                           (num_words - at) / 8);
}

// Contributions to each counter come one work tile after the other.
void check_one_order(const magi_waits& x) {
  struct Step {
    int32_t target;
    int64_t work_tile;
  };
  std::vector<std::vector<Step>> of_counter(static_cast<size_t>(x.num_counters));
  for (int64_t w = 0; w < x.num_work_tiles; ++w)
    for (int64_t i = x.step_begin[w]; i < x.step_begin[w + 1]; ++i) {
      if (x.counter[i] < 0 || x.counter[i] >= x.num_counters)
        fault("Step %lld has counter %d of %lld.", (long long)i, x.counter[i],
              (long long)x.num_counters);
      of_counter[size_t(x.counter[i])].push_back({x.target[i], w});
    }
  for (size_t c = 0; c < of_counter.size(); ++c) {
    std::vector<Step>& steps = of_counter[c];
    std::stable_sort(steps.begin(), steps.end(),
                     [](const Step& a, const Step& b) { return a.target < b.target; });
    size_t first = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (i == 0 || steps[i].work_tile != steps[i - 1].work_tile) first = i;
      if (steps[i].target != int32_t(first))
        fault("Work tile %lld waits for %d at counter %lld, and is number %lld there.",
              (long long)steps[i].work_tile, steps[i].target, (long long)c, (long long)first);
    }
  }
}

void check_all_end(const magi_waits& x) {
  std::vector<int64_t> at(x.step_begin, x.step_begin + x.num_work_tiles), ready;
  std::vector<int32_t> counts(static_cast<size_t>(x.num_counters));
  std::vector<std::vector<int64_t>> waiting(counts.size());
  int64_t taken = 0, ended = 0;
  const auto take = [&] {
    if (taken < x.num_work_tiles) ready.push_back(taken++);
  };
  for (int i = 0; i < x.num_ctas; ++i) take();
  while (!ready.empty()) {
    const int64_t w = ready.back();
    ready.pop_back();
    int64_t& step = at[size_t(w)];
    for (; step < x.step_begin[w + 1]; ++step) {
      const size_t counter = size_t(x.counter[step]);
      if (counts[counter] < x.target[step]) {
        waiting[counter].push_back(w);
        break;
      }
      ++counts[counter];
      ready.insert(ready.end(), waiting[counter].begin(), waiting[counter].end());
      waiting[counter].clear();
    }
    if (step < x.step_begin[w + 1]) continue;
    ++ended;
    take();
  }
  if (ended == x.num_work_tiles) return;
  for (size_t c = 0; c < waiting.size(); ++c)
    if (!waiting[c].empty())
      fault(
          "Work tile %lld waits for ever: for %d at counter %lld, which stays at %d, with %lld of "
          "%lld work tiles taken.",
          (long long)waiting[c][0], x.target[at[size_t(waiting[c][0])]], (long long)c, counts[c],
          (long long)taken, (long long)x.num_work_tiles);
}

template <typename Check>
magi_status status_of(Check check) {
  try {
    check();
    return MAGI_OK;
  } catch (const Fault& found) {
    return fail(MAGI_INVALID_ARGUMENT, "%s", found.text);
  } catch (const std::exception& error) {
    return fail(MAGI_CAPACITY, "No host memory to check a schedule: %s.", error.what());
  }
}

}  // namespace
}  // namespace magi::schedule

extern "C" {

magi_status magi_schedule_check(const int32_t* words, int64_t num_words, int64_t list_at,
                                int32_t heads_kv, int32_t block_m) {
  if (words == nullptr || num_words < 28 || heads_kv < 0 || block_m < 1)
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "Give a plan, m-blocks and how many kv heads there are.");
  return magi::schedule::status_of(
      [&] { magi::schedule::check_schedule(words, num_words, list_at, heads_kv, block_m); });
}

magi_status magi_waits_check(const magi_waits* waits) {
  if (waits == nullptr || waits->num_ctas < 1 || waits->num_work_tiles < 0 ||
      waits->num_counters < 0 || waits->step_begin == nullptr)
    return magi::fail(MAGI_INVALID_ARGUMENT, "Give work tiles, their steps, and a CTA or more.");
  return magi::schedule::status_of([&] {
    magi::schedule::check_one_order(*waits);
    magi::schedule::check_all_end(*waits);
  });
}

}  // extern "C"
