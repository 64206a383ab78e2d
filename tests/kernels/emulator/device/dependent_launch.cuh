// SPDX-License-Identifier: Apache-2.0
// csrc/device/dependent_launch.cuh for the CPU.
#pragma once

#include "cuda_runtime.h"

namespace magi {

inline void start_next_kernel() {
  hopper::maybe_yield();
  hopper::progress();
  hopper::cta->lets_next = true;
}

inline void wait_for_kernel_before() {
  const bool* is_over = hopper::cta->before_is_over;
  if (is_over != nullptr)
    hopper::wait_until(hopper::cta->behind, [=] { return *is_over; }, "the kernel before");
}

}  // namespace magi
