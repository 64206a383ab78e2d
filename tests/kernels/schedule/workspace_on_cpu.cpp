// SPDX-License-Identifier: Apache-2.0
// What a backward's launcher says of a schedule, and the bytes of its workspace (bwd/workspace.h),
// for the CPU.
#include <cstdint>

#include "ffa/sm90/bwd/workspace.h"

// Whether a call with m-blocks of 80 may split tiles as it says.
extern "C" int may_split(const magi_ffa_bwd_params* a, int sms) {
  using Wide = magi::BwdConfig<int, 128, 128, false, true, magi::kBlockM80>;
  return magi::bwd_is_split_run(*a) && magi::bwd_has_deterministic_split<Wide>(*a, sms);
}

extern "C" int can_store_direct(const magi_ffa_bwd_params* a) {
  return magi::bwd_can_store_direct(*a);
}

extern "C" int64_t workspace_of(const magi_ffa_bwd_params* a, int sms) {
  return magi::bwd_bytes<magi::BwdConfig<int, 128, 128, false, false, magi::kBlockM80>>(*a, sms)
      .workspace;
}
