// SPDX-License-Identifier: Apache-2.0
// How a backward is divided into work tiles and what its workspace holds (bwd/workspace.h),
// compiled for the CPU.
#include <cstdint>

#include "ffa/sm90/bwd/workspace.h"

namespace {
template <typename C>
void write(const magi_ffa_bwd_params& a, int sms, int64_t* found) {
  const int parts = magi::bwd_num_head_splits<C>(a, sms);
  const magi::BwdBytes bytes = magi::bwd_bytes<C>(a, sms);
  const int64_t words[] = {parts, magi::bwd_heads_per_l2_group<C>(a, parts, sms),
                           magi::bwd_target_tables<C>(a, parts, sms), bytes.workspace, bytes.order};
  std::copy(words, words + 5, found);
}
}  // namespace

// Tiles in work at the start of a call in deterministic order, on so many multiprocessors.
extern "C" int tiles_at_once(const magi_ffa_bwd_params* a, int num_ctas, int work_tiles) {
  return magi::bwd_tiles_at_once(*a, num_ctas, work_tiles);
}

// Whether a call with m-blocks of 80 may split tiles as it says.
extern "C" int may_split(const magi_ffa_bwd_params* a, int sms) {
  using Wide = magi::BwdConfig<int, 128, 128, false, true, magi::kBlockM80>;
  return magi::bwd_is_split_run(*a) && magi::bwd_has_deterministic_split<Wide>(*a, sms);
}

extern "C" int can_store_direct(const magi_ffa_bwd_params* a) {
  return magi::bwd_can_store_direct(*a);
}

// On `sms` multiprocessors: parts of the query heads of a kv head, kv heads of an L2 group,
// tables of semaphore targets; bytes of the workspace and of an order.
extern "C" void layout_of(const magi_ffa_bwd_params* a, int sms, int64_t* found) {
  const int dim = a->head_dim > a->head_dim_v ? a->head_dim : a->head_dim_v;
  if (dim <= 64)
    write<magi::BwdConfig<int, 64, 64>>(*a, sms, found);
  else if (dim > 128)
    write<magi::BwdConfig<int, 256, 256, false, false, magi::kBlockM64, 2>>(*a, sms, found);
  else if (a->block_m == magi::kBlockM80)
    write<magi::BwdConfig<int, 128, 128, false, false, magi::kBlockM80>>(*a, sms, found);
  else
    write<magi::BwdConfig<int, 128, 128>>(*a, sms, found);
}
