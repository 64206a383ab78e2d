// SPDX-License-Identifier: Apache-2.0
// Launches the forward of index attention in MLA's form.
#pragma once

#include "ffa/sm90/index/launch_resident.h"
#include "ffa/sm90/index/mla/fwd/kernel.cuh"

namespace magi {

template <typename T>
magi_status launch_index_mla_fwd(const magi_ffa_index_fwd_params& a) {
  if (a.total_q == 0) return MAGI_OK;
  IndexFwdParams k;
  MAGI_RETURN(index_fwd_params(a, &k));
  using C = MlaFwdConfig<T>;
  return launch_resident<C, index_mla_fwd<C>>(a, num_work_items(k.work), k,
                                              "launching the forward of index attention");
}

}  // namespace magi

#define MAGI_FFA_INDEX_MLA_FWD_INSTANCE(TYPE, D, DV, STEM)                          \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_index_fwd_params* params) { \
    return magi::launch_index_mla_fwd<TYPE>(*params);                               \
  }
