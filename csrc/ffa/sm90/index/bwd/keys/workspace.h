// SPDX-License-Identifier: Apache-2.0
// What the workspace of the key-stationary backward of index attention holds.
#pragma once

#include "ffa/sm90/bwd/workspace.h"
#include "ffa/sm90/index/bwd/keys/params.h"
#include "magi/index.h"

namespace magi {

constexpr int kMostParts =
    8;  // among which the query heads of a tile are shared out, if they are not by the caller

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct IndexKeysSizes {
  int group, num_tiles, num_lists, num_m_blocks;
  int heads_of_part, heads_of_small_part;
  int64_t most_work_tiles;
};

inline IndexKeysSizes index_keys_sizes(const magi_ffa_index_bwd_keys_params& a, int sms) {
  IndexKeysSizes s;
  s.group = a.heads_q / a.heads_kv;
  s.num_tiles = static_cast<int>(ceil_div(a.total_k, kTileBlockN));
  s.num_lists = static_cast<int>(ceil_div(a.total_q, a.q_block));
  s.num_m_blocks = static_cast<int>(ceil_div(a.total_q, kBlockM64));
  s.heads_of_part = static_cast<int>(ceil_div(s.group, a.num_head_splits));
  s.heads_of_small_part = static_cast<int>(ceil_div(s.group, kMostParts));
  if (s.heads_of_small_part > s.heads_of_part) s.heads_of_small_part = s.heads_of_part;
  // A CTA's share has fewer than two long tiles, and of the last kv head there may be none.
  s.most_work_tiles =
      static_cast<int64_t>(s.num_tiles) * (a.heads_kv - 1) * ceil_div(s.group, s.heads_of_part) +
      (s.num_tiles + 2ll * sms) * ceil_div(s.group, s.heads_of_small_part);
  return s;
}

// Byte offsets.
struct IndexKeysWorkspace {
  int64_t stats, dq_accum, sums, entries, tiles, summed_heads, work_tiles, count, bytes;
};

// `head_dim` is that of the tile.
inline IndexKeysWorkspace index_keys_layout(const magi_ffa_index_bwd_keys_params& a, int sms,
                                            int head_dim) {
  const IndexKeysSizes s = index_keys_sizes(a, sms);
  const int64_t blocks = static_cast<int64_t>(s.num_m_blocks) * a.heads_q,
                tiles = static_cast<int64_t>(s.num_tiles) * a.heads_kv;
  const bool is_shared_out = s.heads_of_small_part < s.group;
  IndexKeysWorkspace w;
  w.stats = 4 * kBwdCounters;
  w.dq_accum = w.stats + 4 * stat_floats(kBlockM64) * blocks;
  w.sums = w.dq_accum + 4ll * dq_block_floats(kBlockM64) * (head_dim / 64) * blocks;
  w.entries = w.sums + (is_shared_out ? 8ll * kTileBlockN * head_dim * tiles : 0);
  w.tiles = whole_lines(w.entries + 4 * s.num_lists * tiles);
  w.summed_heads = whole_lines(w.tiles + 8 * tiles);
  w.work_tiles = whole_lines(w.summed_heads + 8 * tiles);
  w.count = w.work_tiles + 8 * s.most_work_tiles;
  w.bytes = whole_lines(w.count + 4);
  return w;
}

}  // namespace magi
