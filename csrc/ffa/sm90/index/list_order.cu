// SPDX-License-Identifier: Apache-2.0
// Launches the kernel that orders lists, for all variants of the forward that copies blocks.
#include "ffa/common/host.h"
#include "ffa/sm90/index/fwd/blocks/list_order.cuh"

namespace magi {

magi_status order_lists(const ListOrderParams& p, void* stream) {
  const int blocks = (p.num_lists - 1) / kOrderThreads + 1;
  return launch_kernel(index_order_lists, dim3(blocks, p.heads_kv), kOrderThreads, 0, stream, p,
                       "launching the order of the lists");
}

}  // namespace magi
