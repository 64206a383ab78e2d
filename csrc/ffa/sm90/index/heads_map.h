// SPDX-License-Identifier: Apache-2.0
// Tensor maps of rows that belong to query heads, as index attention takes them up: 64 query heads
// of a kv head at a time, of one token.
#pragma once

#include "ffa/common/host.h"

namespace magi {

// (d, head in group, kv head, token); strides in elements.
inline magi_status group_heads_map(CUtensorMap* map, int32_t dtype, const void* base,
                                   int32_t head_dim, int32_t heads_q, int32_t heads_kv,
                                   int32_t tokens, int64_t stride_token, int64_t stride_head,
                                   const char* name) {
  const auto type =
      dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t group = heads_q / heads_kv;
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  return encode_map(map, type, base, {size(head_dim), size(group), size(heads_kv), size(tokens)},
                    {2 * stride_head, 2 * stride_head * group, 2 * stride_token}, {64, 64, 1, 1},
                    name);
}

}  // namespace magi
