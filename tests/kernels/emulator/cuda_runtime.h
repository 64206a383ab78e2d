// SPDX-License-Identifier: Apache-2.0
// What kernels and launchers take from CUDA, for g++: types, built-in functions and the runtime.
// Threads are those of threads.h.
#pragma once

#include "cuda_types.h"

#define __shared__ thread_local  // local to the CTA: each has a thread of the CPU

#include "builtins.h"
#include "stream.h"

// ---- the runtime: one device with one stream, whose kernels run when it is synchronised

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = void*;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace hopper {
// What a test sets: how many CTAs of a kernel there are together, which also is the number of the
// device, because libraries remember such things by that; and what the order of threads in the next
// launch is drawn from.
struct Device {
  int multiprocessors = 1;
  uint64_t seed = 0;
  Stream stream;
};
inline Device device;
}  // namespace hopper

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) {
  return *device = hopper::device.multiprocessors, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  return *value = device, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                               const Params& params) {
  hopper::Device& device = hopper::device;
  device.stream.launch({config->gridDim, static_cast<int>(config->blockDim.x),
                        static_cast<uint32_t>(config->dynamicSmemBytes), [=] { kernel(params); },
                        device.seed++, device.multiprocessors, config->numAttrs != 0});
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  hopper::device.stream.launch({dim3(1), 32, 0,
                                [=] {
                                  if (threadIdx.x == 0) std::memset(at, value, bytes);
                                },
                                0, hopper::device.multiprocessors, false});
  return cudaSuccess;
}
