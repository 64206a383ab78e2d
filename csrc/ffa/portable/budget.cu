// SPDX-License-Identifier: Apache-2.0
#include "ffa/portable/budget.h"

namespace magi::portable {
namespace {

constexpr int kLargeBytes = 163 << 10;  // what sm_80 has; sm_90 and sm_100 have more
std::atomic<bool> is_asked_for{false};

}  // namespace

magi_status is_small(bool* small) {
  static std::atomic<int> known[64];
  int device = 0, bytes = 0;
  MAGI_RETURN(cuda_status(cudaGetDevice(&device), "asking for the current device"));
  bytes = known[device & 63].load(std::memory_order_relaxed);
  if (bytes == 0) {
    MAGI_RETURN(
        cuda_status(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                    "asking for the shared memory of a CTA"));
    known[device & 63].store(bytes, std::memory_order_relaxed);
  }
  *small = bytes < kLargeBytes || is_asked_for.load(std::memory_order_relaxed);
  return MAGI_OK;
}

}  // namespace magi::portable

extern "C" void magi_ffa_use_small_tiles(int32_t use) {
  magi::portable::is_asked_for.store(use != 0, std::memory_order_relaxed);
}
