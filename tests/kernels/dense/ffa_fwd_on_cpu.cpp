// SPDX-License-Identifier: Apache-2.0
// The library of attention kernels for Hopper on the CPU, see emulator/README.md: its entry
// points, launchers and some of its forward kernels.
#define MAGI_VARIANTS_ON_CPU        \
  MAGI_VARIANT(fwd, bf16, 64, 64)   \
  MAGI_VARIANT(fwd, bf16, 96, 96)   \
  MAGI_VARIANT(fwd, fp16, 128, 128) \
  MAGI_VARIANT(fwd, fp16, 192, 128) \
  MAGI_VARIANT(fwd, fp16, 192, 192) \
  MAGI_VARIANT(fwd, bf16, 256, 256)

#include "device_calls.h"
#include "ffa/common/dispatch.cu"
#include "ffa/common/host.cu"
#include "ffa/sm90/fwd/launch.cuh"
#include "ffa/sm90/tiles.cu"

#define MAGI_VARIANT(kind, dtype, d, dv) MAGI_FFA_INSTANCE(kind, magi::dtype, d, dv)
MAGI_VARIANTS_ON_CPU
