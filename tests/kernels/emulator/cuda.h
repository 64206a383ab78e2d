// SPDX-License-Identifier: Apache-2.0
// Tensor maps of the CUDA driver.
#pragma once

#include "cuda_runtime.h"

enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32
};

// Up to five dimensions, innermost first; steps in bytes, those of the first are the element's.
// Boxes have a 128-byte swizzle in shared memory.
struct alignas(64) CUtensorMap {
  uint8_t* base;
  uint64_t sizes[5];
  int64_t steps[5];
  uint32_t box[5];
  uint32_t rank;
};

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, unsigned rank,
                                       void* base, const uint64_t* sizes, const uint64_t* strides,
                                       const uint32_t* box, const uint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  const int64_t element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0 || rank < 3 || rank > 5 ||
      box[0] * element % 16 != 0 || box[0] * element > 128)
    return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  map->base = static_cast<uint8_t*>(base);
  map->rank = rank;
  map->steps[0] = element;
  for (unsigned i = 0; i < rank; ++i) {
    if (box[i] < 1 || box[i] > 256 || sizes[i] < 1) return CUDA_ERROR_INVALID_VALUE;
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (i == 0) continue;
    if (strides[i - 1] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    map->steps[i] = static_cast<int64_t>(strides[i - 1]);
  }
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
enum { cudaEnableDefault = 0 };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
using PFN_cuTensorMapEncodeTiled_v12000 = decltype(&cuTensorMapEncodeTiled);
