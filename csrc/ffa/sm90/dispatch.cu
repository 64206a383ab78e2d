// SPDX-License-Identifier: Apache-2.0
// Entry points of the library: checks of what no variant may get wrong, and the choice of the variant.
#include "../../include/magi/abi.h"
#include "../common/host.h"

#define MAGI_VARIANT(KIND, TYPE, D, DV, SYMBOL)                          \
  extern "C" magi_status SYMBOL(const magi_ffa_##KIND##_params*);        \
  extern "C" magi_status SYMBOL##_workspace(const magi_ffa_##KIND##_params*, int64_t*);
#include "inst/variants.inc"
#undef MAGI_VARIANT

namespace magi {
namespace {

struct FwdVariant {
  int32_t dtype, head_dim, head_dim_v;
  magi_status (*launch)(const magi_ffa_fwd_params*);
  magi_status (*workspace)(const magi_ffa_fwd_params*, int64_t*);
};

[[maybe_unused]] constexpr int32_t kDtype_bf16 = MAGI_BF16, kDtype_fp16 = MAGI_FP16;

#define MAGI_VARIANT(KIND, TYPE, D, DV, SYMBOL) {kDtype_##TYPE, D, DV, SYMBOL, SYMBOL##_workspace},
constexpr FwdVariant kFwdVariants[] = {
#include "inst/variants.inc"
};
#undef MAGI_VARIANT

// The narrowest variant that holds the shape; padding columns are zeros that the copy engine fills in.
const FwdVariant* find_fwd(const magi_ffa_fwd_params& p) {
  const FwdVariant* best = nullptr;
  for (const FwdVariant& v : kFwdVariants) {
    if (v.dtype != p.dtype || v.head_dim < p.head_dim || v.head_dim_v < p.head_dim_v) continue;
    if (best == nullptr || v.head_dim + v.head_dim_v < best->head_dim + best->head_dim_v) best = &v;
  }
  return best;
}

magi_status check_fwd(const magi_ffa_fwd_params& p) {
  if (p.version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT, "params have ABI version %d and this library %d; rebuild the kernels.", p.version,
                MAGI_ABI_VERSION);
  if (p.heads_kv < 1 || p.heads_q < 1 || p.heads_q % p.heads_kv != 0)
    return fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.", p.heads_q, p.heads_kv);
  if (p.pack != 1 && p.pack != p.heads_q / p.heads_kv)
    return fail(MAGI_INVALID_ARGUMENT, "pack is %d; use 1 or heads_q / heads_kv.", p.pack);
  if (p.head_dim < 8 || p.head_dim % 8 || p.head_dim_v < 8 || p.head_dim_v % 8)
    return fail(MAGI_INVALID_ARGUMENT, "head dims %d and %d must be positive multiples of 8.", p.head_dim, p.head_dim_v);
  if (!(p.softmax_scale > 0.f) || p.softcap < 0.f)
    return fail(MAGI_INVALID_ARGUMENT, "softmax_scale must be > 0 and softcap >= 0.");
  if (p.accumulate && p.out_dtype != MAGI_FP32)
    return fail(MAGI_INVALID_ARGUMENT, "accumulate needs a float32 out.");
  if (p.out_dtype != MAGI_FP32 && p.out_dtype != p.dtype)
    return fail(MAGI_INVALID_ARGUMENT, "out must be float32 or have the dtype of q.");
  if (p.total_q < 0 || p.total_k < 0 || p.sm_margin < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q, total_k and sm_margin must be >= 0.");
  if (p.tile_tokens < 1) return fail(MAGI_INVALID_ARGUMENT, "tile_tokens is %d; ask magi_ffa_fwd_tile.", p.tile_tokens);
  return MAGI_OK;
}

magi_status choose_fwd(const magi_ffa_fwd_params& p, const FwdVariant** variant) {
  MAGI_RETURN(check_fwd(p));
  *variant = find_fwd(p);
  if (*variant == nullptr)
    return fail(MAGI_UNSUPPORTED, "No forward kernel for head dims %d and %d in this library; largest is 256.", p.head_dim,
                p.head_dim_v);
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_ffa_fwd_tile(int32_t heads_q, int32_t heads_kv, int32_t head_dim, int32_t head_dim_v,
                              int32_t* tile_tokens, int32_t* num_groups, int32_t* pack) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.", heads_q, heads_kv);
  const int32_t share = heads_q / heads_kv;
  *num_groups = 2;
  *pack = 64 % share == 0 ? share : 1;
  *tile_tokens = 64 * *num_groups / *pack;
  return MAGI_OK;
}

magi_status magi_ffa_fwd_workspace(const magi_ffa_fwd_params* params, int64_t* bytes) {
  const magi::FwdVariant* variant = nullptr;
  MAGI_RETURN(magi::choose_fwd(*params, &variant));
  return variant->workspace(params, bytes);
}

magi_status magi_ffa_fwd(const magi_ffa_fwd_params* params) {
  const magi::FwdVariant* variant = nullptr;
  MAGI_RETURN(magi::choose_fwd(*params, &variant));
  return variant->launch(params);
}

const char* magi_last_error(void) { return magi::error_buffer(); }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }
}
