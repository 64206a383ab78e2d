// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. GPUs before sm_90 do not have it: there the next kernel of a
// stream starts when the one before has ended.
#pragma once

namespace magi {

// Lets the next kernel of the stream start when all CTAs have called
// this or ended, ...
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ... and waits until the kernel before has ended and its writes can be seen. Returns at once in an
// ordinary launch.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace magi
