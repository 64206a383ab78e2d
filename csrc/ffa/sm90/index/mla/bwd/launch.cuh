// SPDX-License-Identifier: Apache-2.0
// Launches the backward of index attention in MLA's form.
#pragma once

#include "ffa/sm90/index/launch_resident.h"
#include "ffa/sm90/index/mla/bwd/kernel.cuh"

namespace magi {

template <typename T>
magi_status launch_index_mla_bwd(const magi_ffa_index_bwd_params& a) {
  if (a.list_begin == a.list_end) return MAGI_OK;
  IndexBwdParams k;
  MAGI_RETURN(index_bwd_params(a, &k));
  using C = MlaBwdConfig<T>;
  return launch_resident<C, index_mla_bwd<C>>(a, k.num_tiles * k.work.groups, k,
                                              "launching the backward of index attention");
}

}  // namespace magi

#define MAGI_FFA_INDEX_MLA_BWD_INSTANCE(TYPE, D, DV, STEM)                          \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_bwd_params* params) { \
    return magi::launch_index_mla_bwd<TYPE>(*params);                               \
  }
