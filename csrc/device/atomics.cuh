// SPDX-License-Identifier: Apache-2.0
// Words in device memory by which CTAs of one GPU tell each other how far they are: thin wrappers
// over PTX. What waits for other GPUs is in comm/symm/signal.cuh.
#pragma once

#include <cstdint>

namespace magi {

__device__ __forceinline__ int load_relaxed(const int32_t* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ int load_acquire(const int32_t* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int32_t* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// For several words behind one fence.
__device__ __forceinline__ void add_relaxed(int32_t* address, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_released(int32_t* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// What was there before.
__device__ __forceinline__ int swap_if_equal(int32_t* address, int expected, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(address), "r"(expected), "r"(value)
               : "memory");
  return before;
}

// From L2, where the other parts' writes are; in the order of the program, because a batch of loads
// would need registers.
__device__ __forceinline__ float2 load_shared_by_all(const float2* address) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void add_to_global_x4(float* address, float a, float b, float c,
                                                 float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// A word that does not change, read anew: what is needed rarely should not hold a register.
__device__ __forceinline__ int32_t load_again(const int32_t* address) {
  int32_t value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

}  // namespace magi
