// SPDX-License-Identifier: Apache-2.0
#include "ffa/common/host.h"

namespace magi {

char* error_buffer() {
  thread_local char text[512] = "";
  return text;
}

magi_status multiprocessors(int* count) {
  static std::atomic<int> known[64];
  int device = 0;
  MAGI_RETURN(cuda_status(cudaGetDevice(&device), "asking for the current device"));
  *count = known[device & 63].load(std::memory_order_relaxed);
  if (*count > 0) return MAGI_OK;
  MAGI_RETURN(cuda_status(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device),
                          "asking for the number of multiprocessors"));
  known[device & 63].store(*count, std::memory_order_relaxed);
  return MAGI_OK;
}

magi_status check_workspace(int64_t have, int64_t need, const char* ask) {
  if (have >= need) return MAGI_OK;
  return fail(MAGI_CAPACITY, "The workspace has %lld bytes and the call needs %lld; ask %s.",
              static_cast<long long>(have), static_cast<long long>(need), ask);
}

// The driver is not linked: its entry point is looked up once.
static PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static std::atomic<void*> known{nullptr};
  void* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
#else  // which asks for the version that it was compiled for, and that is 12.x here
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
    known.store(found, std::memory_order_release);
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

magi_status encode_map(CUtensorMap* map, CUtensorMapDataType type, const void* base,
                       std::initializer_list<uint64_t> sizes,
                       std::initializer_list<int64_t> strides, std::initializer_list<uint32_t> box,
                       const char* name) {
  auto encode = encoder();
  if (encode == nullptr)
    return fail(
        MAGI_CUDA_ERROR,
        "The driver offers no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer does.");
  uint64_t dims[5], steps[5];
  uint32_t boxes[5], ones[5] = {1, 1, 1, 1, 1};
  int rank = 0;
  // A tensor without rows is never read, but a map needs sizes of at least 1.
  for (uint64_t size : sizes) dims[rank++] = size ? size : 1;
  int i = 0;
  for (int64_t stride : strides) steps[i++] = static_cast<uint64_t>(stride);
  i = 0;
  for (uint32_t b : box) boxes[i++] = b;
  const CUresult result =
      encode(map, type, rank, const_cast<void*>(base), dims, steps, boxes, ones,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return fail(MAGI_INVALID_ARGUMENT,
                "%s cannot be described to the copy engine (CUresult %d); its base must be a "
                "multiple of 16 bytes and "
                "its strides multiples of 8 elements.",
                name, static_cast<int>(result));
  return MAGI_OK;
}

}  // namespace magi
