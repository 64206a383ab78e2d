// SPDX-License-Identifier: Apache-2.0
// Launches the forward of index attention.
#pragma once

#include "ffa/sm90/index/fwd/kernel.cuh"
#include "ffa/sm90/index/launch_resident.h"

namespace magi {

template <typename T, int kD>
magi_status launch_index_fwd(const magi_ffa_index_fwd_params& a) {
  if (a.total_q == 0) return MAGI_OK;
  IndexFwdParams k;
  MAGI_RETURN(index_fwd_params(a, &k));
  const char* doing = "launching the forward of index attention";
  using One = IndexFwdConfig<T, kD, 1>;
  using Two = IndexFwdConfig<T, kD, 2>;
  const int tiles = k.work.num_tiles();
  if (k.work.groups == 1) return launch_resident<One, index_fwd<One>>(a, tiles, k, doing);
  return launch_resident<Two, index_fwd<Two>>(a, tiles, k, doing);
}

}  // namespace magi

#define MAGI_FFA_INDEX_FWD_INSTANCE(TYPE, D, DV, STEM)                              \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_params* params) { \
    return magi::launch_index_fwd<TYPE, D>(*params);                                \
  }
