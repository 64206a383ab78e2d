// SPDX-License-Identifier: Apache-2.0
// * Size: m-blocks have 64, 80 or 128 queries.
// * Splits: in deterministic order single tiles may be split, or all of them.
// * Store of dq: clearing dq_accum and rounding it takes as long whatever the mask. Where queries
//   see few keys that is a good part of the time. Then the first writer of an m-block stores, and a
//   single contribution is written rounded (docs/log/ffa_backward_first_stores.md).
// * Order: packed documents are mostly faster one after the other (docs/log/ffa_backward_order.md).
//
// docs/log/ffa_backward_modes.md says what each mode is worth.
#include <optional>

#include "planner/schedule/l2_groups.h"
#include "planner/schedule/splits.h"
#include "planner/schedule/work_tiles.h"

namespace magi::schedule {
namespace {

class Chooser {
 public:
  Chooser(const magi_schedule_problem& p, const TileTable& tiles)
      : p_(p),
        tiles_(tiles),
        shape_{p.heads_kv, group_of(p), p.num_sms, p.num_sms},
        work_tiles_(tiles_of(p.total_k) * p.heads_kv),
        is_whole_(work_tiles_ >= enough_work_tiles(p.num_sms)),
        is_many_(work_tiles_ >= h100::kManyWorkTiles * p.num_sms) {}

  magi_schedule_choice choose() {
    magi_schedule_choice found =
        p_.is_deterministic ? choose_deterministic() : choose_in_no_order();
    const bool is_atomic = !p_.is_deterministic && !found.first_writer;
    if (is_atomic && p_.is_plain && !p_.is_remote && found.num_head_splits == 0)
      found.num_head_splits =
          select_balanced_head_splits(p_, tiles_, found.block_m, found.by_document != 0);
    const bool is_counted = p_.is_deterministic || found.first_writer;
    if (is_counted && p_.is_plain && !p_.is_remote && found.num_splits == 0 && p_.area > 0)
      found.direct_dq_store = tiles_.single_share(found.block_m) >= h100::kMinDirectShare;
    return found;
  }

 private:
  static magi_schedule_choice of(int block_m, int num_head_splits = 0) {
    magi_schedule_choice made{};
    made.block_m = block_m;
    made.num_head_splits = num_head_splits;
    return made;
  }
  magi_schedule_choice by_rounding(bool is_deterministic) const {
    return of(p_.is_plain ? select_block_m(p_, tiles_, is_deterministic) : kNarrow);
  }

  magi_schedule_choice choose_in_no_order() {
    magi_schedule_choice found = by_rounding(false);
    if (!p_.is_remote) {
      if (const int parts = select_head_splits(p_, tiles_)) return of(kNarrow, parts);
      if (tiles_.mean_segments() >= kManySegments) return found;
    }
    const double seen = keys_seen();
    if (found.block_m == kWide && seen >= h100::kLongDocuments && is_many_ && !p_.has_diagonal &&
        p_.heads_q >= h100::kMinGroup * p_.heads_kv && gain() > h100::kManyOfAnSm.min_gain) {
      found.by_document = 1;
      return found;
    }
    const h100::FirstWriterLimits limits = first_writer_limits();
    const bool is_by_document = seen <= limits.max_keys_by_document && gain() > limits.min_gain;
    if (is_by_document || (seen <= limits.max_keys && has_singles(limits.min_single_share))) {
      found = by_rounding(true);
      found.first_writer = 1;
      found.by_document = is_by_document;
    } else {
      found.by_document = found.block_m == kWide && is_many_ && gain() > h100::kMinGain;
    }
    return found;
  }

  magi_schedule_choice choose_deterministic() {
    magi_schedule_choice found = by_rounding(true);
    if (!is_many_ && !p_.is_remote) {
      // There is a kernel for m-blocks of 80.
      const bool has_wide = p_.is_plain && dim_of(p_) > 64 && dim_of(p_) <= 128;
      if (is_whole_ && has_wide && can_split(group_of(p_))) {
        const TileSplit split = select_tile_split(p_, tiles_, found.block_m);
        if (split.parts) {
          found = of(kWide);
          found.split_begin = split.begin;
          found.split_end = split.end;
          found.num_splits = split.parts;
          return found;
        }
      } else if (found.block_m == kNarrow ||
                 p_.area < int64_t(h100::kMinQueriesWithoutHalves) * std::max(p_.total_k, 1)) {
        if (const int parts = select_halves(p_, tiles_)) return of(kNarrow, parts);
      }
    }
    found.by_document = is_whole_ && is_by_document_deterministic();
    return found;
  }

  // Keys that a query sees, on average.
  double keys_seen() const { return double(p_.area) / std::max(p_.total_q, 1); }
  bool has_singles(double least) const {
    return least <= 0 || tiles_.single_share(kNarrow) >= least;
  }
  // As kernels pad it.
  int padded_dim() const { return dim_of(p_) <= 64 ? 64 : dim_of(p_) <= 128 ? 128 : 256; }

  // What was measured of calls of the kind. With keys of other ranks tiles are always whole.
  h100::FirstWriterLimits first_writer_limits() const {
    if (!p_.is_plain || p_.area == 0 || (p_.is_remote && !is_whole_)) return h100::kNever;
    const int dim = padded_dim();
    if (dim == 128 && is_whole_ && p_.heads_q >= h100::kMinGroup * p_.heads_kv)
      return is_many_ ? h100::kManyOfAnSm : h100::kFewOfAnSm;
    if (4ll * p_.total_q * p_.heads_q * dim < h100::kMinDqBytes) return h100::kNever;
    if (is_whole_)
      return dim == 64 ? h100::kDim64 : dim == 128 ? h100::kSmallGroups : h100::kDim256;
    if (dim != 128) return h100::kNever;
    return p_.total_q >= int64_t(h100::kFewKeysRatio) * p_.total_k ? h100::kSplitHeadsFewKeys
                                                                   : h100::kSplitHeads;
  }

  // With one or two query heads in a work tile L2 groups are larger than else, and L2 keeps less of
  // them; with head dims up to 64, where a step is short, work tiles of one document that wait for
  // each other would cost more than that.
  bool is_by_document_deterministic() {
    const int group = shape_.group;
    if (group > kLargeL2Groups || padded_dim() == 64) return gain() > h100::kMinGain;
    const int heads =
        heads_per_l2_group_deterministic(tiles_of(p_.total_k), p_.heads_kv, 1, group, p_.num_sms);
    return gain_by_document(tiles_, shape_, heads) > min_gain_of_few_heads();
  }

  // What one document after the other has to gain. Tiles of causal documents wait for each other
  // less if they come one after the other, which the estimate does not count: so mostly it may be
  // anything.
  double min_gain_of_few_heads() const {
    if (!p_.is_all_causal) return h100::kMinGainNotCausal;
    const bool is_any = shape_.group == 1
                            ? work_tiles_ <= int64_t(h100::kAnyGainMaxWorkTiles) * p_.num_sms
                            : p_.area < int64_t(h100::kAnyGainMaxKeys) * p_.total_q;
    return is_many_ && (is_any || padded_dim() == 256) ? h100::kAnyGain : h100::kMinGain;
  }

  double gain() {
    if (!gain_) gain_ = gain_by_document(tiles_, shape_, shape_.heads_at_once(tiles_.size()));
    return *gain_;
  }

  const magi_schedule_problem& p_;
  const TileTable& tiles_;
  const OrderShape shape_;
  const int64_t work_tiles_;
  const bool is_whole_, is_many_;
  std::optional<double> gain_;
};

}  // namespace

magi_schedule_choice choose(const magi_schedule_problem& p, const TileTable& tiles) {
  return Chooser(p, tiles).choose();
}

}  // namespace magi::schedule
