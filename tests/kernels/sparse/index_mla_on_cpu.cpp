// SPDX-License-Identifier: Apache-2.0
// Index attention in MLA's form for the CPU, see emulator/README.md: its entry points with all
// launches.
#define MAGI_INDEX_VARIANTS_ON_CPU                                      \
  MAGI_INDEX_VARIANT(index_fwd, bf16, 576, magi_ffa_index_mla_fwd_bf16) \
  MAGI_INDEX_VARIANT(index_fwd, fp16, 576, magi_ffa_index_mla_fwd_fp16) \
  MAGI_INDEX_VARIANT(index_bwd, bf16, 576, magi_ffa_index_mla_bwd_bf16) \
  MAGI_INDEX_VARIANT(index_bwd, fp16, 576, magi_ffa_index_mla_bwd_fp16)

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/index/index.cu"
#include "ffa/sm90/index/mla/bwd/launch.cuh"
#include "ffa/sm90/index/mla/fwd/launch.cuh"

MAGI_FFA_INDEX_MLA_FWD_INSTANCE(magi::bf16, 576, 512, index_mla_fwd_bf16)
MAGI_FFA_INDEX_MLA_FWD_INSTANCE(magi::fp16, 576, 512, index_mla_fwd_fp16)
MAGI_FFA_INDEX_MLA_BWD_INSTANCE(magi::bf16, 576, 512, index_mla_bwd_bf16)
MAGI_FFA_INDEX_MLA_BWD_INSTANCE(magi::fp16, 576, 512, index_mla_bwd_fp16)
