// SPDX-License-Identifier: Apache-2.0
// The tiles of forward and backward, for planners.
#include "ffa/common/call_checks.h"
#include "ffa/common/host.h"
#include "ffa/common/variant_table.h"
#include "ffa/sm90/fwd/config.h"

namespace magi {

FwdTileGroups fwd_tile_groups(int32_t head_dim, int32_t head_dim_v) {
  return {fwd_groups(head_dim_v), fwd_few_groups(head_dim, head_dim_v)};
}

}  // namespace magi

extern "C" {

magi_status magi_ffa_bwd_tile(int32_t head_dim, int32_t head_dim_v, int32_t* tile_tokens,
                              int32_t* num_groups) {
  MAGI_RETURN(magi::check_head_dims(head_dim, head_dim_v));
  *tile_tokens = 128;
  *num_groups = 2;
  return MAGI_OK;
}
}
