// SPDX-License-Identifier: Apache-2.0
// What is checked of a plan as a whole: header, slices, where records lie, order and block counts.

#include <algorithm>
#include <cstdarg>
#include <exception>
#include <limits>

#include "planner/plan_walker.h"

namespace magi {
namespace walk {

magi_status fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const magi_status status = vfail(MAGI_INVALID_ARGUMENT, format, arguments);
  va_end(arguments);
  return status;
}

magi_status Walker::check_header() {
  if (plan_ == nullptr) return fault("plan is NULL; give the buffer that holds the plan.");
  if (plan_words_ < 28)
    return fault("plan_words is %lld; a plan has at least 28 words.", (long long)plan_words_);
  memcpy(&header_, plan_, sizeof(header_));
  const magi_tile_plan_header& h = header_;
  if (h.version != MAGI_ABI_VERSION) {
    return fault("The plan has version %d, this library %d; build both from the same source.",
                 h.version, MAGI_ABI_VERSION);
  }
  if (h.status != 0)
    return fault("The plan's status is %d; it is incomplete, its buffer was too small.", h.status);
  if (h.total_q < 0 || h.total_k < 0 || h.tile_tokens < 1 || h.num_groups < 1 || h.num_groups > 3) {
    return fault(
        "The header's total_q %d, total_k %d, tile_tokens %d or num_groups %d is out of range.",
        h.total_q, h.total_k, h.tile_tokens, h.num_groups);
  }
  const int64_t tiles = (int64_t(h.total_q) + h.tile_tokens - 1) / h.tile_tokens;
  if (h.num_tiles != tiles) {
    return fault("The header has num_tiles %d; %d tokens in tiles of %d make %lld.", h.num_tiles,
                 h.total_q, h.tile_tokens, (long long)tiles);
  }
  int64_t words = 32 + 2 * int64_t(h.tile_tokens);
  while (words % 4 != 0) ++words;
  if (h.segment_words != words) {
    return fault("The header has segment_words %d; tiles of %d tokens need %lld.", h.segment_words,
                 h.tile_tokens, (long long)words);
  }
  if (h.words_tiles % 4 != 0 || h.words_order % 4 != 0 || h.words_records % 4 != 0 ||
      h.words_tiles < 28 || h.words_order < h.words_tiles + 8 * tiles ||
      h.words_records < h.words_order + tiles) {
    return fault(
        "The header's sections start at words %d (tiles), %d (order), %d (records); they must be "
        "aligned to 4 words and must not overlap.",
        h.words_tiles, h.words_order, h.words_records);
  }
  if (h.num_segments < 0 || h.words_total < h.words_records + h.num_segments * words ||
      h.words_total > plan_words_) {
    return fault(
        "The header has words_total %d for %d segments in a buffer of %lld words; the segments do "
        "not fit.",
        h.words_total, h.num_segments, (long long)plan_words_);
  }
  if (h.words_first_order != 0 || h.words_work_tiles != 0 || h.reserved[0] != 0 ||
      h.reserved[1] != 0)
    return fault("words_first_order, words_work_tiles or reserved words of the header are not 0.");
  return MAGI_OK;
}

magi_status Walker::check_slices() {
  if (num_slices_ < 0 || (num_slices_ > 0 && slices_ == nullptr)) {
    return fault("num_slices is %lld and slices is %s; give num_slices rows of 5 int32.",
                 (long long)num_slices_, slices_ == nullptr ? "NULL" : "not NULL");
  }
  for (int64_t i = 0; i < num_slices_; ++i) {
    const int32_t* s = slices_ + 5 * i;
    if (s[0] < 0 || s[0] > s[1] || s[1] > header_.total_q || s[2] < 0 || s[2] > s[3] ||
        s[3] > header_.total_k || s[4] < 0 || s[4] > 3) {
      return fault(
          "Slice %lld is q [%d, %d) k [%d, %d) type %d; it does not fit a plan of %d queries and "
          "%d keys.",
          (long long)i, s[0], s[1], s[2], s[3], s[4], header_.total_q, header_.total_k);
    }
    if (s[0] < s[1] && s[2] < s[3]) by_start_.push_back(i);
  }
  std::sort(by_start_.begin(), by_start_.end(),
            [&](int64_t a, int64_t b) { return slices_[5 * a] < slices_[5 * b]; });
  return MAGI_OK;
}

// Lengths of a slice's row intervals change by the same -1, 0 or 1 from row to row, so the rows
// that see something are one run; neighbours in it touch, so what they see together is one
// interval.
magi_status Walker::check_unseen() {
  std::vector<Interval> seen;
  for (const int64_t id : by_start_) {
    const int32_t* s = slices_ + 5 * id;
    const Interval top = row_interval(s, id, s[0]), bottom = row_interval(s, id, s[1] - 1);
    const int64_t at_top = top.hi - top.lo, at_bottom = bottom.hi - bottom.lo;
    if (at_top <= 0 && at_bottom <= 0) continue;
    const int64_t first = at_top > 0 ? s[0] : s[1] - at_bottom;
    const int64_t last = at_bottom > 0 ? s[1] - 1 : s[0] + at_top - 1;
    seen.push_back({row_interval(s, id, first).lo, row_interval(s, id, last).hi, id});
  }
  std::sort(seen.begin(), seen.end());
  int64_t reached = 0;
  for (const Interval& part : seen) {
    if (part.lo > reached) unseen_.push_back({reached, part.lo, -1});
    reached = std::max(reached, part.hi);
  }
  if (reached < header_.total_k) unseen_.push_back({reached, header_.total_k, -1});
  const int32_t has_unseen = unseen_.empty() ? 0 : 1;
  if (header_.has_unseen != has_unseen) {
    if (has_unseen) {
      return fault("The header has has_unseen %d, but no query sees key %lld.", header_.has_unseen,
                   (long long)unseen_[0].lo);
    }
    return fault("The header has has_unseen %d, but every key is seen by some query.",
                 header_.has_unseen);
  }
  return MAGI_OK;
}

magi_status Walker::check_records() {
  const int64_t room = (header_.words_total - header_.words_records) / header_.segment_words;
  std::vector<bool> used(size_t(room), false);
  int64_t total = 0;
  for (int64_t t = 0; t < header_.num_tiles; ++t) {
    const magi_tile_desc desc = tile(t);
    const int64_t token0 = t * header_.tile_tokens;
    const int64_t num_tokens = std::min<int64_t>(header_.tile_tokens, header_.total_q - token0);
    if (desc.token0 != token0 || desc.num_tokens != num_tokens) {
      return fault("Tile %lld has tokens %d + %d; it must have %lld + %lld.", (long long)t,
                   desc.token0, desc.num_tokens, (long long)token0, (long long)num_tokens);
    }
    if (desc.num_segments < 0 || desc.segment_begin < 0 ||
        int64_t(desc.segment_begin) + desc.num_segments > room) {
      return fault("Tile %lld has segments %d + %d; the plan has room for %lld.", (long long)t,
                   desc.segment_begin, desc.num_segments, (long long)room);
    }
    if (desc.reserved[0] != 0 || desc.reserved[1] != 0) {
      return fault("Reserved words of tile %lld are not 0.", (long long)t);
    }
    for (int64_t i = 0; i < desc.num_segments; ++i) {
      if (used[size_t(desc.segment_begin + i)]) {
        return fault("Tile %lld uses record %lld, which another tile uses too.", (long long)t,
                     (long long)(desc.segment_begin + i));
      }
      used[size_t(desc.segment_begin + i)] = true;
    }
    total += desc.num_segments;
  }
  if (total != header_.num_segments) {
    return fault("The header has num_segments %d; the tiles have %lld in all.",
                 header_.num_segments, (long long)total);
  }
  return MAGI_OK;
}

// Neighbours in strict order make the whole list strictly ordered, hence a permutation.
magi_status Walker::check_order() {
  const int32_t* order = plan_ + header_.words_order;
  for (int64_t i = 0; i < header_.num_tiles; ++i) {
    if (order[i] < 0 || order[i] >= header_.num_tiles) {
      return fault("Place %lld of the order has tile %d; there are %d tiles.", (long long)i,
                   order[i], header_.num_tiles);
    }
    if (i == 0) continue;
    const int32_t before = tile(order[i - 1]).cost, cost = tile(order[i]).cost;
    if (before < cost || (before == cost && order[i - 1] >= order[i])) {
      return fault(
          "The order has tile %d (cost %d) before tile %d (cost %d); it must be by decreasing "
          "cost, then by "
          "id, every tile once.",
          order[i - 1], before, order[i], cost);
    }
  }
  return MAGI_OK;
}
magi_status Walker::check_key_blocks() {
  for (int64_t i = 0; i < MAGI_KEY_BLOCK_SIZES; ++i) {
    const int64_t size = 64 + 16 * i;
    int64_t blocks = 0;
    for (int64_t t = 0; t < header_.num_tiles; ++t) {
      for (int64_t s = 0; s < tile(t).num_segments; ++s) {
        const magi_tile_segment head = segment_of(t, s);
        blocks += (int64_t(head.visit_hi) - head.visit_lo + size - 1) / size;
      }
    }
    if (header_.num_key_blocks[i] != blocks) {
      return fault("The header has %lld blocks of %lld keys; the segments make %lld.",
                   (long long)header_.num_key_blocks[i], (long long)size, (long long)blocks);
    }
  }
  return MAGI_OK;
}

}  // namespace walk
}  // namespace magi

extern "C" magi_status magi_tile_plan_check(const int32_t* slices, int64_t num_slices,
                                            const int32_t* plan, int64_t plan_words) {
  try {
    return magi::walk::Walker(slices, num_slices, plan, plan_words).run();
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory to check a tile plan: %s.", error.what());
  }
}
