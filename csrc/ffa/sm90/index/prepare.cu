// SPDX-License-Identifier: Apache-2.0
// Launches the kernels that make the lists of index attention.
#include "ffa/sm90/index/prepare.cuh"

#include "ffa/common/host.h"

namespace magi {
namespace {

constexpr int64_t kMostPrepareBytes = 227 << 10;  // of shared memory that a CTA may have

magi_status check_prepare(const magi_ffa_index_prepare_params& p) {
  if (p.version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", p.version,
                MAGI_ABI_VERSION);
  if (p.num_lists < 0 || p.heads_kv < 1 || p.max_entries < 0 || p.total_k < 0 || p.k_block < 1)
    return fail(MAGI_INVALID_ARGUMENT,
                "%d lists of %d heads and %d entries, %d keys in blocks of %d: "
                "none may be negative, and there is a head and a key in a block.",
                p.num_lists, p.heads_kv, p.max_entries, p.total_k, p.k_block);
  if (static_cast<int64_t>(p.num_lists) * p.heads_kv >= 1ll << 31)
    return fail(MAGI_UNSUPPORTED, "%d lists of %d heads are too many.", p.num_lists, p.heads_kv);
  return MAGI_OK;
}

template <typename Index>
magi_status launch_prepare(const magi_ffa_index_prepare_params& p) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(index_prepare_lists<Index>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(kMostPrepareBytes));
  }));
  return launch_kernel(index_prepare_lists<Index>, dim3(p.num_lists * p.heads_kv), kPrepareThreads,
                       prepare_bytes(p), p.stream, p, "launching the preparation of lists");
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_ffa_index_prepare(const magi_ffa_index_prepare_params* params) {
  using namespace magi;
  MAGI_RETURN(check_prepare(*params));
  magi_ffa_index_prepare_params p = *params;
  p.num_words = static_cast<int32_t>(prepare_words(p));
  if (prepare_bytes(p) > kMostPrepareBytes)
    return fail(MAGI_UNSUPPORTED, "%d keys in blocks of %d are more entries than fit.", p.total_k,
                p.k_block);
  if (p.num_lists == 0) return MAGI_OK;
  return p.is_int64 ? launch_prepare<int64_t>(p) : launch_prepare<int32_t>(p);
}

magi_status magi_ffa_index_blocks(const magi_ffa_index_prepare_params* params) {
  using namespace magi;
  MAGI_RETURN(check_prepare(*params));
  if (params->num_lists == 0) return MAGI_OK;
  const int lists = params->num_lists * params->heads_kv;
  return launch_kernel(index_lists_of_blocks, dim3((lists + kPrepareWarps - 1) / kPrepareWarps),
                       kPrepareThreads, 0, params->stream, *params,
                       "launching the lists of blocks");
}
}
