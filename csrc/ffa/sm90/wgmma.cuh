// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix multiply (wgmma) m64nNk16, fp32 accumulators, bf16 or fp16 operands: thin
// wrappers over PTX.
//
// Accumulator layout: thread t of warp w holds rows 16w + t/4 and + 8; d[4j + b] is column 8j +
// 2(t%4) + b of the first row, d[4j + 2 + b] of the second. Two adjacent n8 blocks of an
// accumulator, packed, are one k16 A fragment.
#pragma once

#include <cstdint>

#include "device/types.cuh"
#include "ffa/sm90/operand.cuh"

namespace magi {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of an accumulator across this point: it does not
// know that wgmma finishes only at the wait.
template <int kCount>
__device__ __forceinline__ void keep_in_place(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// kBMajor, kAMajor 0: the operand is stored K-major (rows of keys); 1: MN-major (transposed on the
// fly).
template <typename T, int kN, int kBMajor>
struct Wgmma;

// Each accumulator list is the next smaller one and more.
#define MAGI_ACC_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MAGI_OUT_16(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MAGI_ACC_32 \
  MAGI_ACC_16       \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MAGI_OUT_32(d)                                                                        \
  MAGI_OUT_16(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
      "+f"(d[14]), "+f"(d[15])
#define MAGI_ACC_48 \
  MAGI_ACC_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MAGI_OUT_48(d)                                                                          \
  MAGI_OUT_32(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), \
      "+f"(d[22]), "+f"(d[23])
#define MAGI_ACC_64 \
  MAGI_ACC_48       \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MAGI_OUT_64(d)                                                                          \
  MAGI_OUT_48(d), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
      "+f"(d[30]), "+f"(d[31])
#define MAGI_ACC_80 \
  MAGI_ACC_64       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MAGI_OUT_80(d)                                                                          \
  MAGI_OUT_64(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), \
      "+f"(d[38]), "+f"(d[39])
#define MAGI_ACC_96 \
  MAGI_ACC_80       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MAGI_OUT_96(d)                                                                          \
  MAGI_OUT_80(d), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
      "+f"(d[46]), "+f"(d[47])
#define MAGI_ACC_112 \
  MAGI_ACC_96        \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MAGI_OUT_112(d)                                                                         \
  MAGI_OUT_96(d), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
      "+f"(d[54]), "+f"(d[55])
#define MAGI_ACC_128 \
  MAGI_ACC_112       \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MAGI_OUT_128(d)                                                                          \
  MAGI_OUT_112(d), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), \
      "+f"(d[62]), "+f"(d[63])
#define MAGI_ACC_192                                                                             \
  MAGI_ACC_128                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83"                                                                                     \
  ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MAGI_OUT_192(d)                                                                          \
  MAGI_OUT_128(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
      "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
      "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
      "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
      "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define MAGI_ACC_256                                                                               \
  MAGI_ACC_192                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115"                                                                         \
  ", %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MAGI_OUT_256(d)                                                                            \
  MAGI_OUT_192(d), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), \
      "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),          \
      "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),          \
      "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),          \
      "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),          \
      "+f"(d[126]), "+f"(d[127])

// Operand numbers after the accumulator: SS takes a, b, keep, major of B, major of A; RS takes
// a0..a3, b, keep, major.
#define MAGI_WGMMA(TYPE, NAME, N, O0, O1, O2, O3, O4, O5, O6)                                      \
  template <int kBMajor>                                                                           \
  struct Wgmma<TYPE, N, kBMajor> {                                                                 \
    template <int kAMajor = 0>                                                                     \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,           \
                                              int keep) {                                          \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #O2                                    \
                   ", 0;\n\t"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                 \
                   " {" MAGI_ACC_##N "}, %" #O0 ", %" #O1 ", p, 1, 1, %" #O4 ", %" #O3 ";\n\t}"    \
                   : MAGI_OUT_##N(d)                                                               \
                   : "l"(a), "l"(b), "r"(keep), "n"(kBMajor), "n"(kAMajor));                       \
    }                                                                                              \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b,    \
                                              int keep) {                                          \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #O5                                    \
                   ", 0;\n\t"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                 \
                   " {" MAGI_ACC_##N "}, {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4          \
                                     ", p, 1, 1, %" #O6 ";\n\t}"                                   \
                   : MAGI_OUT_##N(d)                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kBMajor)); \
    }                                                                                              \
  };

MAGI_WGMMA(bf16, "bf16", 16, 8, 9, 10, 11, 12, 13, 14)
MAGI_WGMMA(fp16, "f16", 16, 8, 9, 10, 11, 12, 13, 14)
MAGI_WGMMA(bf16, "bf16", 32, 16, 17, 18, 19, 20, 21, 22)
MAGI_WGMMA(fp16, "f16", 32, 16, 17, 18, 19, 20, 21, 22)
MAGI_WGMMA(bf16, "bf16", 48, 24, 25, 26, 27, 28, 29, 30)
MAGI_WGMMA(fp16, "f16", 48, 24, 25, 26, 27, 28, 29, 30)
MAGI_WGMMA(bf16, "bf16", 64, 32, 33, 34, 35, 36, 37, 38)
MAGI_WGMMA(fp16, "f16", 64, 32, 33, 34, 35, 36, 37, 38)
MAGI_WGMMA(bf16, "bf16", 80, 40, 41, 42, 43, 44, 45, 46)
MAGI_WGMMA(fp16, "f16", 80, 40, 41, 42, 43, 44, 45, 46)
MAGI_WGMMA(bf16, "bf16", 96, 48, 49, 50, 51, 52, 53, 54)
MAGI_WGMMA(fp16, "f16", 96, 48, 49, 50, 51, 52, 53, 54)
MAGI_WGMMA(bf16, "bf16", 112, 56, 57, 58, 59, 60, 61, 62)
MAGI_WGMMA(fp16, "f16", 112, 56, 57, 58, 59, 60, 61, 62)
MAGI_WGMMA(bf16, "bf16", 128, 64, 65, 66, 67, 68, 69, 70)
MAGI_WGMMA(fp16, "f16", 128, 64, 65, 66, 67, 68, 69, 70)
MAGI_WGMMA(bf16, "bf16", 192, 96, 97, 98, 99, 100, 101, 102)
MAGI_WGMMA(fp16, "f16", 192, 96, 97, 98, 99, 100, 101, 102)
MAGI_WGMMA(bf16, "bf16", 256, 128, 129, 130, 131, 132, 133, 134)
MAGI_WGMMA(fp16, "f16", 256, 128, 129, 130, 131, 132, 133, 134)

#undef MAGI_WGMMA

}  // namespace magi
