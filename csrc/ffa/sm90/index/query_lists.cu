// SPDX-License-Identifier: Apache-2.0
// Launches the kernels that make the lists of query blocks, for all variants of the
// key-stationary backward.
#include "ffa/common/host.h"
#include "ffa/sm90/index/bwd/keys/query_lists.cuh"
#include "ffa/sm90/index/bwd/keys/tile_order.cuh"

namespace magi {

magi_status make_query_lists(const QueryListParams& p, void* stream) {
  MAGI_RETURN(launch_kernel(index_query_lists, dim3(p.lists.num_tiles, p.heads_kv), kPrepareThreads,
                            0, stream, p, "launching the lists of query blocks"));
  return launch_kernel(index_order_tiles, dim3(p.heads_kv), kPrepareThreads, 0, stream, p,
                       "launching the order of the tiles");
}

}  // namespace magi
