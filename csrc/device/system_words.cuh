// SPDX-License-Identifier: Apache-2.0
// Words that other GPUs read and write, and the time: thin wrappers over PTX.
#pragma once

#include <cstdint>

namespace magi {

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release_system(void* at, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Milliseconds, nearly (2^20 ns), modulo 2^32: few registers, for waits that share a thread with
// other work.
__device__ __forceinline__ uint32_t milliseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return static_cast<uint32_t>(now >> 20);
}

}  // namespace magi
