// SPDX-License-Identifier: Apache-2.0
// The forward of block lists for the CPU, see emulator/README.md: its entry point and launch.
#define MAGI_INDEX_VARIANTS_ON_CPU                                                    \
  MAGI_INDEX_VARIANT(index_fwd_blocks, bf16, 128, magi_ffa_index_fwd_blocks_bf16_128) \
  MAGI_INDEX_VARIANT(index_fwd_blocks, fp16, 64, magi_ffa_index_fwd_blocks_fp16_64)

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/index/fwd/blocks/launch.cuh"
#include "ffa/sm90/index/index.cu"
#include "ffa/sm90/index/list_order.cu"

MAGI_FFA_INDEX_FWD_BLOCKS_INSTANCE(magi::bf16, 128, 128, index_fwd_blocks_bf16_128)
MAGI_FFA_INDEX_FWD_BLOCKS_INSTANCE(magi::fp16, 64, 64, index_fwd_blocks_fp16_64)

extern "C" {

const char* order_lists(const int32_t* counts, int num_lists, int heads_kv, int32_t* workspace) {
  using namespace magi;
  if (order_lists({counts, workspace + 1, workspace, num_lists, heads_kv}, nullptr) != MAGI_OK)
    return error_buffer();
  return synchronize();
}
}
