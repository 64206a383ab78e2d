// SPDX-License-Identifier: Apache-2.0
// csrc/device/atomics.cuh for the CPU.
#pragma once

#include "cuda_runtime.h"

namespace magi {

inline int load_relaxed(const int32_t* address) {
  hopper::spin();
  return *address;
}
inline int load_acquire(const int32_t* address) { return load_relaxed(address); }
inline void store_release(int32_t* address, int value) { atomicExch(address, value); }
inline void add_relaxed(int32_t* address, int value) { atomicAdd(address, value); }
inline void add_released(int32_t* address, int value) { atomicAdd(address, value); }
inline int swap_if_equal(int32_t* address, int expected, int value) {
  return atomicCAS(address, expected, value);
}
inline float2 load_shared_by_all(const float2* address) { return *address; }
inline void add_to_global_x4(float* address, float a, float b, float c, float d) {
  hopper::maybe_yield();
  address[0] += a, address[1] += b, address[2] += c, address[3] += d;
}
inline int32_t load_again(const int32_t* address) { return *address; }

}  // namespace magi
