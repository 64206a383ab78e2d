// SPDX-License-Identifier: Apache-2.0
// Checks of what a caller asks of a backward. Messages name fields of magi_ffa_bwd_params.
#pragma once

#include "ffa/common/host.h"
#include "ffa/sm90/bwd/workspace.h"

namespace magi {

template <typename C>
magi_status check_work_list(const magi_ffa_bwd_params& a, bool is_remote, int sms) {
  if (a.work_list == nullptr || (bwd_takes_work_list<C>(a, sms) && !is_remote)) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT,
              "This call takes no work list: it has %lld tiles of %d kv heads, dq_mode %d and "
              "softcap %g%s%s; leave work_list NULL where magi_ffa_bwd_workspace says so.",
              static_cast<long long>(bwd_tiles(a)), a.heads_kv, a.dq_mode, a.softcap,
              a.has_dropout ? ", dropout" : "", is_remote ? ", and keys of other ranks" : "");
}

// What the caller says of split tiles, in deterministic order.
template <typename C>
magi_status check_deterministic_split(const magi_ffa_bwd_params& a, bool is_remote, int sms) {
  if (a.split_begin == 0 && a.split_end == 0 && a.splits_per_split_tile == 0) return MAGI_OK;
  if (!bwd_is_split_run(a))
    return fail(MAGI_INVALID_ARGUMENT,
                "The tiles from %d to before %d of %lld cannot be split into %d parts of the %d "
                "query heads of a kv head; give 2, 4 or 8 parts "
                "of 1, 2, 4 ... heads, of fewer than %d tiles.",
                a.split_begin, a.split_end, static_cast<long long>(bwd_tiles(a)),
                a.splits_per_split_tile, a.heads_q / a.heads_kv, kMaxPartials / a.heads_kv);
  if (is_remote || !bwd_has_deterministic_split<C>(a, sms))
    return fail(MAGI_INVALID_ARGUMENT,
                "Tiles are split where the caller says so only in deterministic order (dq_mode is "
                "%d), with m-blocks of 80 (block_m is %d), of keys that are "
                "all there and at most %d tiles whose heads are not shared out anyway; leave "
                "split_begin, split_end and splits_per_split_tile 0.",
                a.dq_mode, a.block_m, kMaxTimed);
  return MAGI_OK;
}

inline magi_status check_direct_dq_store(const magi_ffa_bwd_params& a, bool is_remote) {
  if (!a.direct_dq_store || (bwd_can_store_direct(a) && !is_remote)) return MAGI_OK;
  return fail(
      MAGI_INVALID_ARGUMENT,
      "dq is written at once where an m-block has one contribution (direct_dq_store) only in "
      "deterministic order or where the first writer stores (dq_mode is %d), "
      "in 16 bits (grad_dtype is %d), of keys that are all there, without accumulate (%d), "
      "softcap (%g), dropout (%d) or split tiles; leave direct_dq_store 0.",
      a.dq_mode, a.grad_dtype, a.accumulate, a.softcap, a.has_dropout);
}

template <typename C>
magi_status check_arguments(const magi_ffa_bwd_params& a, bool is_remote, int sms) {
  // The kernel counts blocks of queries and heads in 16 bits.
  constexpr int kMaxQueries = 65535 * C::kBlockM;
  if (a.total_q > kMaxQueries || a.heads_q > 32767)
    return fail(MAGI_UNSUPPORTED,
                "%d queries of %d heads are more than the %d of 32767 that one call takes; give "
                "them in stages.",
                a.total_q, a.heads_q, kMaxQueries);
  MAGI_RETURN(
      check_workspace(a.workspace_bytes, bwd_bytes<C>(a, sms).workspace, "magi_ffa_bwd_workspace"));
  if (reinterpret_cast<uintptr_t>(a.workspace) % 128 ||
      reinterpret_cast<uintptr_t>(a.order) % 128 || reinterpret_cast<uintptr_t>(a.work_list) % 16)
    return fail(
        MAGI_INVALID_ARGUMENT,
        "The workspace and the order must lie at multiples of 128 bytes, the work list at a "
        "multiple of 16.");
  if (a.total_q == 0 || a.total_k == 0)
    return fail(MAGI_INVALID_ARGUMENT, "There are no queries or no keys.");
  if (bwd_is_general(a) && a.dq_mode == MAGI_DQ_ATOMIC)
    return fail(MAGI_INVALID_ARGUMENT,
                "With softcap or dropout dq_mode must be %d (the first writer stores) or %d "
                "(deterministic); it is %d.",
                MAGI_DQ_FIRST_WRITER, MAGI_DQ_DETERMINISTIC, a.dq_mode);
  MAGI_RETURN(check_deterministic_split<C>(a, is_remote, sms));
  MAGI_RETURN(check_direct_dq_store(a, is_remote));
  return check_work_list<C>(a, is_remote, sms);
}

}  // namespace magi
