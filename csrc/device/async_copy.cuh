// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies of 16 bytes that each thread makes itself, for rows that lie anywhere: thin
// wrappers over PTX.
#pragma once

#include <cstdint>

namespace magi {

// Past L1, and the rest of the 256 bytes around `src` comes to L2.
__device__ __forceinline__ void async_copy_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src)
               : "memory");
}

// Zeros unless `take`; `src` is not read then, but has to be an address of the tensor.
__device__ __forceinline__ void async_copy_16_or_zero(uint32_t dst, const void* src, bool take) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(take ? 16 : 0)
               : "memory");
}

// One arrival at the barrier, which was initialised with it, when all earlier copies of this thread
// are there. Whoever reads them by wgmma after the barrier calls fence_async_proxy in between.
__device__ __forceinline__ void async_copies_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// All copies of this thread are there, for itself: before it ends.
__device__ __forceinline__ void async_copies_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace magi
