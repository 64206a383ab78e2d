// SPDX-License-Identifier: Apache-2.0
// The key-stationary backward of index attention for the CPU, see emulator/README.md: its
// entry points with all launches.
#define MAGI_INDEX_VARIANTS_ON_CPU                                                \
  MAGI_INDEX_VARIANT(index_bwd_keys, bf16, 128, magi_ffa_index_bwd_keys_bf16_128) \
  MAGI_INDEX_VARIANT(index_bwd_keys, fp16, 64, magi_ffa_index_bwd_keys_fp16_64)

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/index/bwd/keys/launch.cuh"
#include "ffa/sm90/index/index.cu"
#include "ffa/sm90/index/query_lists.cu"

MAGI_FFA_INDEX_BWD_KEYS_INSTANCE(magi::bf16, 128, 128, index_bwd_keys_bf16_128)
MAGI_FFA_INDEX_BWD_KEYS_INSTANCE(magi::fp16, 64, 64, index_bwd_keys_fp16_64)

extern "C" {

// The lists by tiles of keys and the order of the tiles that a call would make, in its workspace;
// `at` becomes where entries, tiles, work tiles and their number are.
const char* make_lists(const magi_ffa_index_bwd_keys_params* a, int64_t* at) {
  using namespace magi;
  constexpr int kD = 64;
  IndexKeysCall call{};
  index_keys_params<BwdConfig<fp16, kD, kD>>(*a, hopper::device.multiprocessors, &call);
  const IndexKeysWorkspace w = index_keys_layout(*a, hopper::device.multiprocessors, kD);
  at[0] = w.entries, at[1] = w.tiles, at[2] = w.work_tiles, at[3] = w.count;
  if (make_query_lists(call.lists, nullptr) != MAGI_OK) return error_buffer();
  return synchronize();
}
}
