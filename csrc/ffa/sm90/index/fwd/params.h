// SPDX-License-Identifier: Apache-2.0
// What the forward of index attention is launched with.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffa/sm90/index/key_lists.h"
#include "ffa/sm90/index/work_tile.h"

namespace magi {

struct IndexFwdParams {
  CUtensorMap q_map, out_map;  // (d, head in group, token, kv head)
  GatheredTensor k, v;
  KeyLists keys;
  WorkTiles work;
  float* lse;
  float scale_log2, unscale, slack;  // as in FwdKernelParams
};

}  // namespace magi
