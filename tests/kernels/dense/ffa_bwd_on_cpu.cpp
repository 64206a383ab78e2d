// SPDX-License-Identifier: Apache-2.0
// The same as ffa_fwd_on_cpu.cpp with backward kernels.
#define MAGI_VARIANTS_ON_CPU                                      \
  MAGI_VARIANT(bwd, bf16, 64, 64, magi_ffa_bwd_bf16_d64_dv64)     \
  MAGI_VARIANT(bwd, bf16, 96, 96, magi_ffa_bwd_bf16_d96_dv96)     \
  MAGI_VARIANT(bwd, bf16, 192, 128, magi_ffa_bwd_bf16_d192_dv128) \
  MAGI_VARIANT(bwd, bf16, 192, 192, magi_ffa_bwd_bf16_d192_dv192) \
  MAGI_VARIANT(bwd, bf16, 256, 256, magi_ffa_bwd_bf16_d256_dv256) \
  MAGI_VARIANT(bwd, fp16, 128, 128, magi_ffa_bwd_fp16_d128_dv128)

#include "device_calls.h"
#include "ffa/common/dispatch.cu"
#include "ffa/common/host.cu"
#include "ffa/sm90/bwd/launch.cuh"
#include "ffa/sm90/tiles.cu"

MAGI_FFA_BWD_INSTANCE(magi::bf16, 64, 64, bwd_bf16_d64_dv64)
MAGI_FFA_BWD_INSTANCE(magi::bf16, 96, 96, bwd_bf16_d96_dv96)
MAGI_FFA_BWD_INSTANCE(magi::bf16, 192, 128, bwd_bf16_d192_dv128)
MAGI_FFA_BWD_INSTANCE(magi::bf16, 192, 192, bwd_bf16_d192_dv192)
MAGI_FFA_BWD_INSTANCE(magi::bf16, 256, 256, bwd_bf16_d256_dv256)
MAGI_FFA_BWD_INSTANCE(magi::fp16, 128, 128, bwd_fp16_d128_dv128)
