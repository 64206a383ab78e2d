// SPDX-License-Identifier: Apache-2.0
// Launches the backward of index attention.
#pragma once

#include "ffa/sm90/index/bwd/kernel.cuh"
#include "ffa/sm90/index/launch_resident.h"

namespace magi {

template <typename T, int kD>
magi_status launch_index_bwd(const magi_ffa_index_bwd_params& a) {
  if (a.list_begin == a.list_end) return MAGI_OK;
  IndexBwdParams k;
  MAGI_RETURN(index_bwd_params(a, &k));
  const char* doing = "launching the backward of index attention";
  using One = IndexBwdConfig<T, kD, 64>;
  using Two = IndexBwdConfig<T, kD, 128>;
  if (k.work.groups == 1) return launch_resident<One, index_bwd<One>>(a, k.num_tiles, k, doing);
  return launch_resident<Two, index_bwd<Two>>(a, k.num_tiles, k, doing);
}

}  // namespace magi

#define MAGI_FFA_INDEX_BWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_params* params) { \
    return magi::launch_index_bwd<TYPE, D>(*params);                                \
  }
