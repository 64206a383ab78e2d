// SPDX-License-Identifier: Apache-2.0
// What the kernels need to know of keys of other ranks.
#pragma once

#include <climits>

#include "ffa/common/host.h"
#include "ffa/sm90/peer_kv.cuh"

namespace magi {

// `block` keys are copied at a time; without `remote` there are no such keys, and all of total_k
// are local.
inline magi_status remote_keys(const magi_ffa_remote* remote, int32_t total_k,
                               CUtensorMapDataType type, uint64_t d, uint64_t dv, uint64_t heads,
                               uint32_t block, RemoteKeys* to) {
  *to = {};
  to->base = INT_MAX;
  to->local_keys = total_k;
  if (remote == nullptr) return MAGI_OK;
  const uint64_t rows =
      remote->rows > 0 ? remote->rows
                       : kRemoteTile;  // no map is of no rows; nothing is read by this one then
  const int64_t row_k = 2ll * d, row_v = 2ll * dv, h = static_cast<int64_t>(heads);
  MAGI_RETURN(encode_map(&to->k_map, type, remote->k, {d, rows, heads}, {row_k * h, row_k},
                         {64, block, 1}, "remote k"));
  MAGI_RETURN(encode_map(&to->v_map, type, remote->v, {dv, rows, heads}, {row_v * h, row_v},
                         {64, block, 1}, "remote v"));
  to->base = remote->base;
  to->rank = remote->rank;
  to->world = remote->world;
  to->num_signals = remote->num_signals;
  to->timeout_ms = remote->timeout_ms;
  to->buffer = remote->buffer;
  to->owners = remote->owners;
  to->arrivals = remote->arrivals;
  to->failed_peer = remote->failed_peer;
  to->target_rows = remote->target_rows;
  to->dk_targets = remote->dk_targets;
  to->dv_targets = remote->dv_targets;
  to->summed = remote->summed;
  to->dk_sums = remote->dk_sums;
  to->dv_sums = remote->dv_sums;
  to->local_keys = remote->local_keys;
  to->wire_is_float = remote->wire_dtype == MAGI_FP32;
  return MAGI_OK;
}

}  // namespace magi
