// SPDX-License-Identifier: Apache-2.0
// The kernels of a library, and the choice among them.
#pragma once

#include "device/types.cuh"
#include "magi/abi.h"

// The host side of a variant, whose kernels are compiled in a file of their own.
#define MAGI_FFA_INSTANCE(KIND, TYPE, D, DV)                                                 \
  template magi_status magi::launch_variant<TYPE, D, DV>(const magi_ffa_##KIND##_params&,    \
                                                         const magi_ffa_remote*);            \
  template magi_status magi::variant_workspace<TYPE, D, DV>(const magi_ffa_##KIND##_params&, \
                                                            int64_t*);

namespace magi {

// launch.cuh of the forward and of the backward of a family of GPUs define these.
template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_fwd_params& params, const magi_ffa_remote* remote);
template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_bwd_params& params, const magi_ffa_remote* remote);
template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_fwd_params& params, int64_t* bytes);
template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_bwd_params& params, int64_t* needs);

template <typename Params>
struct Variant {
  int32_t dtype, head_dim, head_dim_v;
  magi_status (*launch)(const Params&, const magi_ffa_remote*);
  magi_status (*workspace)(const Params&, int64_t*);
};
using FwdVariant = Variant<magi_ffa_fwd_params>;
using BwdVariant = Variant<magi_ffa_bwd_params>;

// The narrowest variant that holds the shape; padding columns are zeros.
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

// Groups of 64 rows in the tiles of the forward variants of these head dims: of the tile for many
// work tiles, and of the smaller one for few, 0 if there is none.
struct FwdTileGroups {
  int32_t many, few;
};
FwdTileGroups fwd_tile_groups(int32_t head_dim, int32_t head_dim_v);

// The kernel for a call, after the checks of its parameters.
magi_status choose(const magi_ffa_fwd_params& p, FwdVariant* found);
magi_status choose(const magi_ffa_bwd_params& p, BwdVariant* found);

}  // namespace magi
