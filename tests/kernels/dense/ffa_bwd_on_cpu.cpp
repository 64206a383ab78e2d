// SPDX-License-Identifier: Apache-2.0
// The same as ffa_fwd_on_cpu.cpp with backward kernels.
#define MAGI_VARIANTS_ON_CPU        \
  MAGI_VARIANT(bwd, bf16, 64, 64)   \
  MAGI_VARIANT(bwd, bf16, 96, 96)   \
  MAGI_VARIANT(bwd, bf16, 192, 128) \
  MAGI_VARIANT(bwd, bf16, 192, 192) \
  MAGI_VARIANT(bwd, bf16, 256, 256) \
  MAGI_VARIANT(bwd, fp16, 128, 128)

#include "device_calls.h"
#include "ffa/common/dispatch.cu"
#include "ffa/common/host.cu"
#include "ffa/sm90/bwd/launch.cuh"
#include "ffa/sm90/tiles.cu"

#define MAGI_VARIANT(kind, dtype, d, dv) MAGI_FFA_INSTANCE(kind, magi::dtype, d, dv)
MAGI_VARIANTS_ON_CPU
