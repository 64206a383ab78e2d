// SPDX-License-Identifier: Apache-2.0
// The library of attention kernels for Hopper on the CPU, see emulator/README.md: its entry
// points, launchers and some of its forward kernels.
#define MAGI_VARIANTS_ON_CPU                                      \
  MAGI_VARIANT(fwd, bf16, 64, 64, magi_ffa_fwd_bf16_d64_dv64)     \
  MAGI_VARIANT(fwd, bf16, 96, 96, magi_ffa_fwd_bf16_d96_dv96)     \
  MAGI_VARIANT(fwd, fp16, 128, 128, magi_ffa_fwd_fp16_d128_dv128) \
  MAGI_VARIANT(fwd, fp16, 192, 128, magi_ffa_fwd_fp16_d192_dv128) \
  MAGI_VARIANT(fwd, fp16, 192, 192, magi_ffa_fwd_fp16_d192_dv192) \
  MAGI_VARIANT(fwd, bf16, 256, 256, magi_ffa_fwd_bf16_d256_dv256)

#include "device_calls.h"
#include "ffa/common/dispatch.cu"
#include "ffa/common/host.cu"
#include "ffa/sm90/fwd/launch.cuh"
#include "ffa/sm90/tiles.cu"

MAGI_FFA_FWD_INSTANCE(magi::bf16, 64, 64, fwd_bf16_d64_dv64)
MAGI_FFA_FWD_INSTANCE(magi::bf16, 96, 96, fwd_bf16_d96_dv96)
MAGI_FFA_FWD_INSTANCE(magi::fp16, 128, 128, fwd_fp16_d128_dv128)
MAGI_FFA_FWD_INSTANCE(magi::fp16, 192, 128, fwd_fp16_d192_dv128)
MAGI_FFA_FWD_INSTANCE(magi::fp16, 192, 192, fwd_fp16_d192_dv192)
MAGI_FFA_FWD_INSTANCE(magi::bf16, 256, 256, fwd_bf16_d256_dv256)
