// SPDX-License-Identifier: Apache-2.0
// Host helpers of the launchers: statuses with a message, tensor maps, device properties. No global
// CUDA state.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "magi/abi.h"

namespace magi {

char* error_buffer();  // of the calling thread, 512 bytes

inline magi_status fail(magi_status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(error_buffer(), 512, format, args);
  va_end(args);
  return status;
}

inline magi_status cuda_status(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return MAGI_OK;
  return fail(MAGI_CUDA_ERROR, "%s: %s.", doing, cudaGetErrorString(error));
}

#define MAGI_RETURN(expression)               \
  do {                                        \
    const magi_status status_ = (expression); \
    if (status_ != MAGI_OK) return status_;   \
  } while (0)

// Runs something once per device, from any thread; a failure is tried again next time.
class DeviceOnce {
 public:
  template <typename F>
  magi_status run(F&& f) {
    int device = 0;
    MAGI_RETURN(cuda_status(cudaGetDevice(&device), "asking for the current device"));
    const uint64_t bit = 1ull << (device & 63);
    if (done_.load(std::memory_order_acquire) & bit) return MAGI_OK;
    MAGI_RETURN(cuda_status(f(), "configuring a kernel"));
    done_.fetch_or(bit, std::memory_order_release);
    return MAGI_OK;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

magi_status multiprocessors(int* count);

// A sentence if the caller's workspace is too small; `ask` is the function that tells its size.
magi_status check_workspace(int64_t have, int64_t need, const char* ask);

// Launches a kernel. Where it may begin `early`, while the one before in the stream is ending, it
// waits for that where it has to.
template <typename Params>
magi_status launch_kernel(void (*kernel)(Params), dim3 grid, int threads, size_t smem, void* stream,
                          const Params& params, const char* doing, bool early = false) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), doing);
}

template <typename Params>
magi_status launch_behind(void (*kernel)(Params), dim3 grid, int threads, size_t smem, void* stream,
                          const Params& params, const char* doing) {
  return launch_kernel(kernel, grid, threads, smem, stream, params, doing, true);
}

// Tiles of a kernel times its head units, which must be countable in 32 bits with some to spare.
template <typename KernelParams>
magi_status count_work_tiles(const KernelParams& k, int64_t* count) {
  *count = static_cast<int64_t>(k.num_tiles) * k.head_units;
  if (*count < (1ll << 31) - (1 << 16)) return MAGI_OK;
  return fail(MAGI_UNSUPPORTED, "%lld tiles are too many; split the heads.",
              static_cast<long long>(*count));
}

// Tensor map with 128-byte swizzle: sizes and box in elements, innermost first; strides in bytes of
// dims 1.. .
magi_status encode_map(CUtensorMap* map, CUtensorMapDataType type, const void* base,
                       std::initializer_list<uint64_t> sizes,
                       std::initializer_list<int64_t> strides, std::initializer_list<uint32_t> box,
                       const char* name);

}  // namespace magi
