// SPDX-License-Identifier: Apache-2.0
// Entry points of every library of attention kernels: checks of what no variant may get wrong, and
// the choice of the variant. `inst` is the folder of the generated instances.
#include "ffa/common/call_checks.h"
#include "ffa/common/host.h"
#include "ffa/common/variant_table.h"

namespace magi {
namespace {

[[maybe_unused]] constexpr int32_t kDtype_bf16 = MAGI_BF16, kDtype_fp16 = MAGI_FP16;

#define MAGI_VARIANT(KIND, TYPE, D, DV)            \
  finder->offer(Variant<magi_ffa_##KIND##_params>{ \
      kDtype_##TYPE, D, DV, launch_variant<TYPE, D, DV>, variant_workspace<TYPE, D, DV>});
template <typename Params>
void offer_all([[maybe_unused]] Finder<Params>* finder) {
#include "inst/variants.inc"
}
#undef MAGI_VARIANT

template <typename Params>
magi_status narrowest(const Params& p, const char* direction, Variant<Params>* found) {
  Finder<Params> finder{p};
  offer_all(&finder);
  if (finder.best == nullptr)
    return fail(MAGI_UNSUPPORTED,
                "No %s kernel for head dims %d and %d in this library; largest is 256.", direction,
                p.head_dim, p.head_dim_v);
  *found = finder.kept;
  return MAGI_OK;
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

magi_status choose(const magi_ffa_fwd_params& p, FwdVariant* found) {
  MAGI_RETURN(check_fwd(p));
  return narrowest(p, "forward", found);
}

magi_status choose(const magi_ffa_bwd_params& p, BwdVariant* found) {
  MAGI_RETURN(check_bwd(p));
  return narrowest(p, "backward", found);
}

}  // namespace magi

extern "C" {

int32_t magi_ffa_has_variant(int32_t kind, int32_t dtype, int32_t head_dim, int32_t head_dim_v) {
  if (head_dim < 1 || head_dim_v < 1) return 0;
  if (kind == MAGI_FWD) return magi::has<magi_ffa_fwd_params>(dtype, head_dim, head_dim_v);
  if (kind == MAGI_BWD) return magi::has<magi_ffa_bwd_params>(dtype, head_dim, head_dim_v);
  return 0;
}

magi_status magi_ffa_fwd_tile(int32_t dtype, int32_t heads_q, int32_t heads_kv, int32_t head_dim,
                              int32_t head_dim_v, int32_t* num_groups, int32_t* few_groups,
                              int32_t* pack) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d query heads do not divide over %d key heads.",
                      heads_q, heads_kv);
  magi::FwdVariant kernel;
  magi_ffa_fwd_params p{};
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.dtype = dtype;
  MAGI_RETURN(magi::narrowest(p, "forward", &kernel));
  const int32_t group_size = heads_q / heads_kv;
  const magi::FwdTileGroups groups = magi::fwd_tile_groups(kernel.head_dim, kernel.head_dim_v);
  *num_groups = groups.many;
  *few_groups = groups.few;
  *pack = 64 % group_size == 0 ? group_size : 1;
  return MAGI_OK;
}

magi_status magi_ffa_fwd_workspace(const magi_ffa_fwd_params* params, int64_t* bytes) {
  magi::FwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  return kernel.workspace(*params, bytes);
}

magi_status magi_ffa_fwd(const magi_ffa_fwd_params* params) {
  magi::FwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  MAGI_RETURN(magi::check_dropout_is_given(*params));
  return kernel.launch(*params, nullptr);
}

magi_status magi_ffa_bwd_workspace(const magi_ffa_bwd_params* params, int64_t* needs) {
  magi::BwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  return kernel.workspace(*params, needs);
}

magi_status magi_ffa_bwd(const magi_ffa_bwd_params* params) {
  magi::BwdVariant kernel;
  MAGI_RETURN(magi::choose(*params, &kernel));
  MAGI_RETURN(magi::check_dropout_is_given(*params));
  return kernel.launch(*params, nullptr);
}

const char* magi_last_error(void) { return magi::error_buffer(); }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }
}
