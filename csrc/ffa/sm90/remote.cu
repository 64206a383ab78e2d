// SPDX-License-Identifier: Apache-2.0
// Entry points of calls whose keys are in two places (magi_ffa_remote), with this rank's put.
#include "comm/symm/launch.h"
#include "ffa/common/host.h"
#include "ffa/common/variant_table.h"

namespace magi {
namespace {

magi_status check_remote(const magi_ffa_remote& r, int32_t total_k, int32_t dtype) {
  if (r.version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "remote has ABI version %d and this library %d; rebuild the kernels.", r.version,
                MAGI_ABI_VERSION);
  if (r.base % 128 || r.rows % 128 || r.rows < 0 || r.local_keys < 1 ||
      r.base < r.local_keys + 128 || total_k != r.base + r.rows)
    return fail(MAGI_INVALID_ARGUMENT,
                "%d local and %d remote keys from %d on do not make up total_k = %d: remote keys "
                "come in tiles of 128 and begin at "
                "a multiple of 128, at least 128 beyond the local ones.",
                r.local_keys, r.rows, r.base, total_k);
  if (r.wire_dtype != dtype && r.wire_dtype != MAGI_FP32)
    return fail(MAGI_INVALID_ARGUMENT, "Remote gradients must be float32 or have the dtype of k.");
  return MAGI_OK;
}

template <typename Params>
magi_status check_no_dropout(const Params& p) {
  if (!p.has_dropout) return MAGI_OK;
  return fail(MAGI_UNSUPPORTED,
              "There is no dropout beside keys that arrive; run the stages one by one.");
}

// This rank's rows of k and v, on their way before the kernel that runs beside them.
template <typename Params>
magi_status put_keys(const Params& p, const magi_symm_put_params* put) {
  if (put == nullptr) return MAGI_OK;
  magi_symm_put_params of_call = *put;
  of_call.source[0] = p.k;
  of_call.source[1] = p.v;
  of_call.stream = p.stream;
  return magi_symm_put(&of_call);
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_ffa_fwd_remote(const magi_ffa_fwd_params* params, const magi_ffa_remote* remote,
                                const magi_symm_put_params* put, void* event) {
  magi::FwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  MAGI_RETURN(magi::check_no_dropout(*params));
  if (remote != nullptr) MAGI_RETURN(magi::check_remote(*remote, params->total_k, params->dtype));
  MAGI_RETURN(magi::put_keys(*params, put));
  MAGI_RETURN(kernel.launch(*params, remote));
  return magi::record_end(event, params->stream);
}

magi_status magi_ffa_bwd_remote(const magi_ffa_bwd_params* params, const magi_ffa_remote* remote,
                                const magi_symm_put_params* put) {
  magi::BwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  MAGI_RETURN(magi::check_no_dropout(*params));
  if (remote != nullptr) {
    MAGI_RETURN(magi::check_remote(*remote, params->total_k, params->dtype));
    if (params->accumulate || params->grad_dtype == MAGI_FP32)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "Gradients with remote keys are of 16 bits and not accumulated.");
    if (remote->summed == nullptr || remote->senders == nullptr || remote->grads.own == nullptr ||
        remote->grads.of_rank == nullptr)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "A backward with remote keys needs summed, senders and the "
                        "buffers of gradients.");
  }
  MAGI_RETURN(magi::put_keys(*params, put));
  return kernel.launch(*params, remote);
}
}
