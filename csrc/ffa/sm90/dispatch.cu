// SPDX-License-Identifier: Apache-2.0
// Entry points of the library: checks of what no variant may get wrong, and the choice of the
// variant.
#include "comm/symm/launch.h"
#include "ffa/common/host.h"

#define MAGI_VARIANT(KIND, TYPE, D, DV, SYMBOL)                                           \
  extern "C" magi_status SYMBOL(const magi_ffa_##KIND##_params*, const magi_ffa_remote*); \
  extern "C" magi_status SYMBOL##_workspace(const magi_ffa_##KIND##_params*, int64_t*);
#include "inst/variants.inc"
#undef MAGI_VARIANT

namespace magi {
namespace {

template <typename Params>
struct Variant {
  int32_t dtype, head_dim, head_dim_v;
  magi_status (*launch)(const Params*, const magi_ffa_remote*);
  magi_status (*workspace)(const Params*, int64_t*);
};
using FwdVariant = Variant<magi_ffa_fwd_params>;
using BwdVariant = Variant<magi_ffa_bwd_params>;

[[maybe_unused]] constexpr int32_t kDtype_bf16 = MAGI_BF16, kDtype_fp16 = MAGI_FP16;

// The narrowest variant that holds the shape; padding columns are zeros that the copy engine fills
// in.
template <typename Params>
struct Finder {
  const Params& p;
  const Variant<Params>* best = nullptr;
  Variant<Params> kept{};

  void offer(const Variant<Params>& v) {
    if (v.dtype != p.dtype || v.head_dim < p.head_dim || v.head_dim_v < p.head_dim_v) return;
    if (best != nullptr && v.head_dim + v.head_dim_v >= kept.head_dim + kept.head_dim_v) return;
    kept = v;
    best = &kept;
  }
  template <typename Other>
  void offer(const Variant<Other>&) {}
};

#define MAGI_VARIANT(KIND, TYPE, D, DV, SYMBOL) \
  finder->offer(                                \
      Variant<magi_ffa_##KIND##_params>{kDtype_##TYPE, D, DV, SYMBOL, SYMBOL##_workspace});
template <typename Params>
void offer_all([[maybe_unused]] Finder<Params>* finder) {
#include "inst/variants.inc"
}
#undef MAGI_VARIANT

magi_status check_shapes(int32_t version, int32_t heads_q, int32_t heads_kv, int32_t head_dim,
                         int32_t head_dim_v) {
  if (version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", version,
                MAGI_ABI_VERSION);
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.", heads_q,
                heads_kv);
  if (head_dim < 8 || head_dim % 8 || head_dim_v < 8 || head_dim_v % 8)
    return fail(MAGI_INVALID_ARGUMENT, "head dims %d and %d must be positive multiples of 8.",
                head_dim, head_dim_v);
  return MAGI_OK;
}

magi_status check_fwd(const magi_ffa_fwd_params& p) {
  MAGI_RETURN(check_shapes(p.version, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v));
  if (p.pack != 1 && p.pack != p.heads_q / p.heads_kv)
    return fail(MAGI_INVALID_ARGUMENT, "pack is %d; epoch 1 or heads_q / heads_kv.", p.pack);
  if (!(p.softmax_scale > 0.f) || p.softcap < 0.f)
    return fail(MAGI_INVALID_ARGUMENT, "softmax_scale must be > 0 and softcap >= 0.");
  if (p.accumulate && p.out_dtype != MAGI_FP32)
    return fail(MAGI_INVALID_ARGUMENT, "accumulate needed_signals a float32 out.");
  if (p.out_dtype != MAGI_FP32 && p.out_dtype != p.dtype)
    return fail(MAGI_INVALID_ARGUMENT, "out must be float32 or have the dtype of q.");
  if (p.total_q < 0 || p.total_k < 0 || p.sm_margin < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q, total_k and sm_margin must be >= 0.");
  if (p.tile_tokens < 1)
    return fail(MAGI_INVALID_ARGUMENT, "tile_tokens is %d; ask magi_ffa_fwd_tile.", p.tile_tokens);
  return MAGI_OK;
}

magi_status check_bwd(const magi_ffa_bwd_params& p) {
  MAGI_RETURN(check_shapes(p.version, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v));
  if (!(p.softmax_scale > 0.f) || p.softcap < 0.f)
    return fail(MAGI_INVALID_ARGUMENT, "softmax_scale must be > 0 and softcap >= 0.");
  if (p.accumulate && p.grad_dtype != MAGI_FP32)
    return fail(MAGI_INVALID_ARGUMENT, "accumulate needed_signals float32 gradients.");
  if (p.grad_dtype != MAGI_FP32 && p.grad_dtype != p.dtype)
    return fail(MAGI_INVALID_ARGUMENT, "Gradients must be float32 or have the dtype of q.");
  if (p.dq_mode < MAGI_DQ_ATOMIC || p.dq_mode > MAGI_DQ_FIRST_WRITER)
    return fail(MAGI_INVALID_ARGUMENT, "dq_mode is %d; epoch one of magi_dq_mode.", p.dq_mode);
  if (p.total_q < 0 || p.total_k < 0 || p.sm_margin < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q, total_k and sm_margin must be >= 0.");
  return MAGI_OK;
}

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
magi_status choose(const Params& p, const char* direction, Finder<Params>* finder) {
  offer_all(finder);
  if (finder->best != nullptr) return MAGI_OK;
  return fail(MAGI_UNSUPPORTED,
              "No %s kernel for head dims %d and %d in this library; largest is 256.", direction,
              p.head_dim, p.head_dim_v);
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

template <typename Params>
bool has(int32_t dtype, int32_t head_dim, int32_t head_dim_v) {
  Params p{};
  p.dtype = dtype;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  Finder<Params> finder{p};
  offer_all(&finder);
  return finder.best != nullptr;
}

}  // namespace
}  // namespace magi

extern "C" {

int32_t magi_ffa_has_variant(int32_t kind, int32_t dtype, int32_t head_dim, int32_t head_dim_v) {
  if (head_dim < 1 || head_dim_v < 1) return 0;
  if (kind == MAGI_FWD) return magi::has<magi_ffa_fwd_params>(dtype, head_dim, head_dim_v);
  if (kind == MAGI_BWD) return magi::has<magi_ffa_bwd_params>(dtype, head_dim, head_dim_v);
  return 0;
}

magi_status magi_ffa_fwd_tile(int32_t heads_q, int32_t heads_kv, int32_t head_dim,
                              int32_t head_dim_v, int32_t* tile_tokens, int32_t* num_groups,
                              int32_t* pack) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.",
                      heads_q, heads_kv);
  const int32_t fragment = heads_q / heads_kv;
  *num_groups = 2;
  *pack = 64 % fragment == 0 ? fragment : 1;
  *tile_tokens = 64 * *num_groups / *pack;
  return MAGI_OK;
}

magi_status magi_ffa_fwd_workspace(const magi_ffa_fwd_params* params, int64_t* bytes) {
  magi::Finder<magi_ffa_fwd_params> finder{*params};
  MAGI_RETURN(magi::check_fwd(*params));
  MAGI_RETURN(magi::choose(*params, "forward", &finder));
  return finder.best->workspace(params, bytes);
}

magi_status magi_ffa_fwd_remote(const magi_ffa_fwd_params* params, const magi_ffa_remote* remote,
                                const magi_symm_put_params* put, void* event) {
  magi::Finder<magi_ffa_fwd_params> finder{*params};
  MAGI_RETURN(magi::check_fwd(*params));
  if (remote != nullptr) MAGI_RETURN(magi::check_remote(*remote, params->total_k, params->dtype));
  MAGI_RETURN(magi::choose(*params, "forward", &finder));
  MAGI_RETURN(magi::put_keys(*params, put));
  MAGI_RETURN(finder.best->launch(params, remote));
  return magi::record_end(event, params->stream);
}

magi_status magi_ffa_fwd(const magi_ffa_fwd_params* params) {
  return magi_ffa_fwd_remote(params, nullptr, nullptr, nullptr);
}

magi_status magi_ffa_bwd_tile(int32_t head_dim, int32_t head_dim_v, int32_t* tile_tokens,
                              int32_t* num_groups) {
  if (head_dim < 8 || head_dim_v < 8)
    return magi::fail(MAGI_INVALID_ARGUMENT, "head dims %d and %d must be positive multiples of 8.",
                      head_dim, head_dim_v);
  *tile_tokens = 128;
  *num_groups = 2;
  return MAGI_OK;
}

magi_status magi_ffa_bwd_workspace(const magi_ffa_bwd_params* params, int64_t* bytes) {
  magi::Finder<magi_ffa_bwd_params> finder{*params};
  MAGI_RETURN(magi::check_bwd(*params));
  MAGI_RETURN(magi::choose(*params, "backward", &finder));
  return finder.best->workspace(params, bytes);
}

magi_status magi_ffa_bwd_remote(const magi_ffa_bwd_params* params, const magi_ffa_remote* remote,
                                const magi_symm_put_params* put) {
  magi::Finder<magi_ffa_bwd_params> finder{*params};
  MAGI_RETURN(magi::check_bwd(*params));
  if (remote != nullptr) {
    MAGI_RETURN(magi::check_remote(*remote, params->total_k, params->dtype));
    if (params->accumulate || params->grad_dtype == MAGI_FP32)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "Gradients with remote keys are of 16 bits and not accumulated.");
    if (remote->summed == nullptr || remote->senders == nullptr || remote->grads.own == nullptr ||
        remote->grads.of_rank == nullptr)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "A backward with remote keys needed_signals summed, senders and the "
                        "buffers of gradients.");
  }
  MAGI_RETURN(magi::choose(*params, "backward", &finder));
  MAGI_RETURN(magi::put_keys(*params, put));
  return finder.best->launch(params, remote);
}

magi_status magi_ffa_bwd(const magi_ffa_bwd_params* params) {
  return magi_ffa_bwd_remote(params, nullptr, nullptr);
}

const char* magi_last_error(void) { return magi::error_buffer(); }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }
}
