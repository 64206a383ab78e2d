// SPDX-License-Identifier: Apache-2.0
// Tiles whose query heads are shared out among several units, because there are too few tiles to fill the GPU. Each unit
// leaves its dk and dv in the workspace; the one that arrives last adds all of them up, in the order of the heads whoever it
// is, so that results do not depend on timing.
#pragma once

#include "bwd_step.cuh"

namespace magi {

constexpr int kBwdArrivalsAt = 16;  // of the counters: one for each warpgroup of a tile

// Floats of one warpgroup's part: dk, then dv, in the order of the registers.
template <typename C>
__host__ __device__ constexpr int64_t grad_part_floats() {
  return 128 * C::kOut;
}

// Adds four values from L2, where the other parts' writes are; in the order of the program, because a batch of loads would
// need registers.
__device__ __forceinline__ void add_part(float* sum, const float4* address) {
  asm volatile(
      "{\n\t"
      ".reg .f32 a, b, c, d;\n\t"
      "ld.global.cg.v4.f32 {a, b, c, d}, [%4];\n\t"
      "add.f32 %0, %0, a;\n\t"
      "add.f32 %1, %1, b;\n\t"
      "add.f32 %2, %2, c;\n\t"
      "add.f32 %3, %3, d;\n\t"
      "}"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "l"(address)
      : "memory");
}

// True for the part that came last: then dk and dv hold the sum over all parts. `tile_unit` numbers tiles, heads and passes.
template <typename C>
__device__ __forceinline__ bool join_grads(const BwdKernelParams& p, float (&dk)[C::kOut / 2], float (&dv)[C::kOut / 2],
                                           int tile_unit, int part, int group) {
  constexpr int kStride = grad_part_floats<C>() / 4, kHalf = 128 * (C::kOut / 8);
  const int slot = C::kGroups * tile_unit + group;
  float4* first = reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(slot) * p.head_parts * kStride +
                  thread_again() % 128;
  float4* mine = first + part * kStride;
#pragma unroll
  for (int i = 0; i < C::kOut / 8; ++i) {
    mine[128 * i] = make_float4(dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]);
    mine[kHalf + 128 * i] = make_float4(dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]);
  }
  __threadfence();
  named_barrier(kGroupBarrier + group, 128);
  bool last = false;
  if (thread_again() % 128 == 0) {
    last = atomicAdd(p.workspace + kBwdArrivalsAt + slot, 1) == p.head_parts - 1;
    __threadfence();
  }
  if (!any_at_barrier(kGroupBarrier + group, 128, last)) return false;
#pragma unroll
  for (int i = 0; i < C::kOut / 2; ++i) dk[i] = dv[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < p.head_parts; ++i, first += kStride) {
#pragma unroll
    for (int j = 0; j < C::kOut / 8; ++j) add_part(dk + 4 * j, first + 128 * j);
#pragma unroll
    for (int j = 0; j < C::kOut / 8; ++j) add_part(dv + 4 * j, first + kHalf + 128 * j);
  }
  return true;
}

}  // namespace magi
