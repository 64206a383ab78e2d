// SPDX-License-Identifier: Apache-2.0
// csrc/device/system_words.cuh for the CPU.
#pragma once

#include "cuda_runtime.h"

namespace magi {

inline uint32_t load_acquire_system(const uint32_t* at) {
  hopper::spin();
  return *at;
}
inline void store_release_system(uint32_t* at, uint32_t value) { atomicExch(at, value); }
// Goes on with each look, so that who waits in vain finds out; slowly, so that nobody else gives
// up.
inline uint32_t milliseconds() {
  static uint32_t looks = 0;
  return looks++ / 16;
}

}  // namespace magi
