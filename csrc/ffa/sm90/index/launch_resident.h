// SPDX-License-Identifier: Apache-2.0
// Launches a kernel of index attention, whose CTAs stay and take tile after tile.
#pragma once

#include "ffa/common/host.h"

namespace magi {

// `a` are the parameters of the call, `k` those of the kernel.
template <typename C, auto kKernel, typename CallParams, typename KernelParams>
magi_status launch_resident(const CallParams& a, int num_tiles, const KernelParams& k,
                            const char* doing) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const int room = C::kCtas * (sms - a.sm_margin > 1 ? sms - a.sm_margin : 1);
  const int grid = num_tiles < room ? num_tiles : room;
  return launch_kernel(kKernel, dim3(grid), C::kThreads, C::kSmemBytes, a.stream, k, doing);
}

}  // namespace magi
