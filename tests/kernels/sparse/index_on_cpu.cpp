// SPDX-License-Identifier: Apache-2.0
// Index attention for the CPU, see emulator/README.md: entry points with all launches, and the
// kernels that make its lists.
#define MAGI_INDEX_VARIANTS_ON_CPU                                      \
  MAGI_INDEX_VARIANT(index_fwd, bf16, 128, magi_ffa_index_fwd_bf16_128) \
  MAGI_INDEX_VARIANT(index_fwd, fp16, 64, magi_ffa_index_fwd_fp16_64)   \
  MAGI_INDEX_VARIANT(index_bwd, bf16, 128, magi_ffa_index_bwd_bf16_128) \
  MAGI_INDEX_VARIANT(index_bwd, fp16, 64, magi_ffa_index_bwd_fp16_64)

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/index/bwd/launch.cuh"
#include "ffa/sm90/index/fwd/launch.cuh"
#include "ffa/sm90/index/index.cu"
#include "ffa/sm90/index/prepare.cu"

MAGI_FFA_INDEX_FWD_INSTANCE(magi::bf16, 128, 128, index_fwd_bf16_128)
MAGI_FFA_INDEX_FWD_INSTANCE(magi::fp16, 64, 64, index_fwd_fp16_64)
MAGI_FFA_INDEX_BWD_INSTANCE(magi::bf16, 128, 128, index_bwd_bf16_128)
MAGI_FFA_INDEX_BWD_INSTANCE(magi::fp16, 64, 64, index_bwd_fp16_64)
