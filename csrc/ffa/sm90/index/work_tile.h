// SPDX-License-Identifier: Apache-2.0
// Work tiles of index attention: query rows that share a list of keys, 64 for each warpgroup, and
// how the rows of a list are divided into tiles.
#pragma once

#include <cstdint>

#include "ffa/common/host.h"

namespace magi {

// The query heads of a kv head and, where they divide 64, the tokens that share the list, token by
// token. Else a list is of one token, and its heads go on in the second warpgroup.
struct WorkTiles {
  int32_t total_q, heads_q, heads_kv;
  int32_t group;                  // query heads of a kv head
  int32_t pack;                   // heads side by side in the rows of a warpgroup
  int32_t rows;                   // of the 64 of a warpgroup that are used
  int32_t token_step, head_step;  // from one warpgroup to the next
  int32_t tile_tokens, list_tokens;
  int32_t tiles_of_list;
  int32_t groups;     // warpgroups of 64 rows that a tile fills: 1 or 2
  int32_t num_lists;  // blocks of tokens times kv heads

  __host__ __device__ int num_tiles() const { return num_lists * tiles_of_list; }
};

struct WorkTile {
  int list, token, kv_head;
};

struct QueryRow {
  int token, head;
  bool exists;
};

__device__ __forceinline__ WorkTile work_tile(const WorkTiles& w, int number) {
  WorkTile t;
  t.list = number / w.tiles_of_list;
  const int block = t.list / w.heads_kv;
  t.kv_head = t.list - block * w.heads_kv;
  t.token = block * w.list_tokens + (number - t.list * w.tiles_of_list) * w.tile_tokens;
  return t;
}

// Row `row` of warpgroup `group`.
__device__ __forceinline__ QueryRow query_row(const WorkTiles& w, const WorkTile& t, int group,
                                              int row) {
  const int in_tile = row / w.pack;
  const int in_group = group * w.head_step + row - in_tile * w.pack;
  QueryRow r;
  r.token = t.token + group * w.token_step + in_tile;
  r.head = t.kv_head * w.group + in_group;
  r.exists = row < w.rows && in_group < w.group && r.token < w.total_q;
  return r;
}

inline magi_status work_tiles(int32_t total_q, int32_t heads_q, int32_t heads_kv, int32_t q_block,
                              WorkTiles* w) {
  *w = WorkTiles{};
  w->total_q = total_q;
  w->heads_q = heads_q;
  w->heads_kv = heads_kv;
  w->group = heads_q / heads_kv;
  w->list_tokens = q_block;
  w->num_lists =
      static_cast<int32_t>((static_cast<int64_t>(total_q) + q_block - 1) / q_block) * heads_kv;
  const bool packs = 64 % w->group == 0;
  const int64_t list_rows = static_cast<int64_t>(q_block) * w->group;
  if (packs ? list_rows > 64 && list_rows % 64 != 0 : q_block != 1 || list_rows > 128)
    return fail(
        MAGI_UNSUPPORTED,
        "%d query heads share a kv head and %d tokens a list; the product has to be up to 64 or a "
        "multiple, of up to 64 heads that divide 64, or there is one token and up to 128 heads.",
        w->group, q_block);
  if (!packs) {
    w->pack = w->rows = w->head_step = 64;
    w->groups = w->group > 64 ? 2 : 1;
    w->tile_tokens = w->tiles_of_list = 1;
    return MAGI_OK;
  }
  w->groups = list_rows % 128 == 0 ? 2 : 1;
  w->pack = w->group;
  w->token_step = q_block < 64 / w->group ? q_block : 64 / w->group;
  w->rows = w->token_step * w->group;
  w->tile_tokens = w->token_step * w->groups;
  w->tiles_of_list = q_block / w->tile_tokens;
  return MAGI_OK;
}

// Tensor map of the rows of one warpgroup: (d, head in group, token, kv head); strides in elements.
inline magi_status rows_map(CUtensorMap* map, const WorkTiles& w, int32_t dtype, const void* base,
                            int32_t head_dim, int64_t stride_token, int64_t stride_head,
                            const char* name) {
  const auto type =
      dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto size = [](int32_t x) { return static_cast<uint64_t>(x); };
  const auto box = [](int32_t x) { return static_cast<uint32_t>(x); };
  return encode_map(map, type, base,
                    {size(head_dim), size(w.group), size(w.total_q), size(w.heads_kv)},
                    {2 * stride_head, 2 * stride_token, 2 * stride_head * w.group},
                    {64, box(w.pack), box(w.rows / w.pack), 1}, name);
}

}  // namespace magi
