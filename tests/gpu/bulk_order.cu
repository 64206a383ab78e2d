// SPDX-License-Identifier: Apache-2.0
// Do additions by bulk copies keep an order that is passed on by a counter? Chains of CTAs add to
// the same 32 KB, one after the other, the first by a store; beside them others keep the memory
// busy. Prints how many words differ from the sum in order.
//
//   nvcc -O3 -arch=sm_90a -o bulk_order bulk_order.cu && ./bulk_order [relaxed|released] [launches]
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call)                                                   \
  do {                                                                \
    cudaError_t status = (call);                                      \
    if (status != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); \
      exit(2);                                                        \
    }                                                                 \
  } while (0)

constexpr int kBytes = 32768, kFloats = kBytes / 4;
constexpr int kLinks = 4, kCtas = 120,
              kRegions = 2112;  // contributions to a region; CTAs, kLinks of which share regions
constexpr int kThreads = 160, kShared = 160 << 10;  // so much that a multiprocessor takes one CTA

// Sizes differ, so that sums in another order are rounded to other values.
__device__ float contribution(int region, int turn, int i) {
  uint32_t h = (i * 2654435761u) ^ (turn * 40503u + 12345u) ^ (region * 97u);
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  const float x = static_cast<float>(static_cast<int>(h & 0xffff) - 32768);
  return __fadd_rn(__fmul_rn(__fmul_rn(x, 1.f + turn % 7), 0.001f), 0.3f);
}

template <bool kReleased>
__global__ void __launch_bounds__(kThreads, 1) chain(float* sums, int* counts) {
  extern __shared__ __align__(128) float staged[];
  const int group = blockIdx.x / kLinks, turn = blockIdx.x % kLinks;
  for (int region = group; region < kRegions; region += kCtas / kLinks) {
    for (int i = threadIdx.x; i < kFloats; i += kThreads) staged[i] = contribution(region, turn, i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      int seen = 0;
      while (seen < turn)
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(counts + region)
                     : "memory");
      float* to = sums + static_cast<size_t>(region) * kFloats;
      const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(staged));
      if (turn == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(kBytes)
                     : "memory");
      else
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
            "r"(from), "r"(kBytes)
            : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      if (kReleased)
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counts + region), "r"(1)
                     : "memory");
      else
        asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counts + region), "r"(1)
                     : "memory");
    }
    __syncthreads();
  }
}

__global__ void compare(const float* sums, int* wrong) {
  for (size_t at = blockIdx.x * size_t{blockDim.x} + threadIdx.x; at < size_t{kRegions} * kFloats;
       at += size_t{gridDim.x} * blockDim.x) {
    float want = contribution(at / kFloats, 0, at % kFloats);
    for (int turn = 1; turn < kLinks; ++turn)
      want = __fadd_rn(want, contribution(at / kFloats, turn, at % kFloats));
    if (sums[at] != want) atomicAdd(wrong, 1);
  }
}

__global__ void keep_memory_busy(float4* values, size_t count) {
  float sum = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const float4 x = __ldcg(values + i);
    sum += x.x;
    if (i % 4 == 0) __stcg(values + i, make_float4(x.y, x.x, x.z, x.w));
  }
  if (sum == 1.2345f) values[0].x = sum;
}

int main(int argc, char** argv) {
  const bool released = argc < 2 || strcmp(argv[1], "relaxed") != 0;
  const int launches = argc > 2 ? atoi(argv[2]) : 4000;
  constexpr size_t kSumBytes = size_t{kRegions} * kBytes, kBusyBytes = 64 << 20;
  float* sums;
  float4* busy;
  int *counts, *wrong;
  CHECK(cudaMalloc(&sums, kSumBytes));
  CHECK(cudaMalloc(&busy, kBusyBytes));
  CHECK(cudaMalloc(&counts, kRegions * 4));
  CHECK(cudaMalloc(&wrong, 4));
  CHECK(cudaMemset(busy, 0, kBusyBytes));
  CHECK(cudaMemset(wrong, 0, 4));
  auto* kernel = released ? chain<true> : chain<false>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  cudaStream_t work, side;
  CHECK(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  for (int i = 0; i < launches; ++i) {
    CHECK(cudaMemsetAsync(counts, 0, kRegions * 4, work));
    CHECK(cudaMemsetAsync(sums, 0x41, kSumBytes, work));
    keep_memory_busy<<<12, 1024, 0, side>>>(busy, kBusyBytes / sizeof(float4));
    kernel<<<kCtas, kThreads, kShared, work>>>(sums, counts);
    compare<<<1024, 256, 0, work>>>(sums, wrong);
    if (i % 50 == 49) CHECK(cudaDeviceSynchronize());
  }
  CHECK(cudaDeviceSynchronize());
  int found;
  CHECK(cudaMemcpy(&found, wrong, 4, cudaMemcpyDeviceToHost));
  printf("%d\n", found);
  return 0;
}
