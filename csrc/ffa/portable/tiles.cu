// SPDX-License-Identifier: Apache-2.0
// The tiles of these kernels, for planners.
#include "ffa/portable/budget.h"
#include "ffa/portable/bwd/config.h"

extern "C" {

magi_status magi_ffa_fwd_tile(int32_t heads_q, int32_t heads_kv, int32_t head_dim,
                              int32_t head_dim_v, int32_t* tile_tokens, int32_t* num_groups,
                              int32_t* pack) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.",
                      heads_q, heads_kv);
  const int32_t fragment = heads_q / heads_kv;
  *num_groups = 2;
  *pack = 64 % fragment == 0 ? fragment : 1;
  *tile_tokens = 64 * *num_groups / *pack;
  return MAGI_OK;
}

magi_status magi_ffa_bwd_tile(int32_t head_dim, int32_t head_dim_v, int32_t* tile_tokens,
                              int32_t* num_groups) {
  if (head_dim < 8 || head_dim_v < 8)
    return magi::fail(MAGI_INVALID_ARGUMENT, "head dims %d and %d must be positive multiples of 8.",
                      head_dim, head_dim_v);
  return magi::portable::with_budget([&](auto small) {
    const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    *tile_tokens = magi::portable::bwd_shape(widest, decltype(small)::value).keys;
    *num_groups = 2;
    return MAGI_OK;
  });
}
}
