// SPDX-License-Identifier: Apache-2.0
// Reads of shared memory by its 32-bit address, and values that are the same in a whole warp.
#pragma once

#include <cstdint>

namespace magi {

__device__ __forceinline__ int4 lds_int4(uint32_t address) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void sts_release(uint32_t address, int a) {
  asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

// Another thread of the CTA has released it.
__device__ __forceinline__ int lds_acquire(uint32_t address) {
  int v;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 lds_uint4(uint32_t address) {
  const int4 v = lds_int4(address);
  return make_uint4(v.x, v.y, v.z, v.w);
}

__device__ __forceinline__ void sts_int(uint32_t address, int a) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

__device__ __forceinline__ void sts_int2(uint32_t address, int a, int b) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void sts_int4(uint32_t address, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// 16 bytes of zeros.
__device__ __forceinline__ void zero_chunk(uint32_t address) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void sts_float4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

__device__ __forceinline__ void sts_float2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ int lds_int(uint32_t address) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ int2 lds_int2(uint32_t address) {
  int2 v;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float2 lds_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 lds_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The same value in every lane, in a way that the compiler can see: control flow and descriptors
// that depend on it then live in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// The thread index, read anew: what is needed rarely should not hold a register.
__device__ __forceinline__ int thread_again() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

}  // namespace magi
