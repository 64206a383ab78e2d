// SPDX-License-Identifier: Apache-2.0
// Host side of one forward variant: checks, tensor maps, launch.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "ffa/common/fwd_scalars.h"
#include "ffa/common/host.h"
#include "ffa/common/variant_table.h"
#include "ffa/sm90/fwd/kernel.cuh"
#include "ffa/sm90/peer_kv.h"

namespace magi {

constexpr int kMostBlocks = 65535;  // 16 bits count the key blocks of a segment

template <typename C>
magi_status fwd_maps(const magi_ffa_fwd_params& a, const magi_ffa_remote* remote,
                     FwdKernelParams* k) {
  const CUtensorMapDataType type =
      a.dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const uint64_t head_units = k->head_units, pack = a.pack, tq = a.total_q;
  const uint64_t tk = remote != nullptr ? remote->local_keys : a.total_k;
  const uint64_t dq = a.head_dim, dv = a.head_dim_v, hk = a.heads_kv;
  const uint32_t tile_tokens = a.tile_tokens, group_tokens = 64 / a.pack;
  MAGI_RETURN(encode_map(&k->q_map, type, a.q, {dq, pack, tq, head_units},
                         {2 * a.q_stride_head, 2 * a.q_stride_token, 2 * a.q_stride_head * a.pack},
                         {64, (uint32_t)pack, tile_tokens, 1}, "q"));
  // Remote keys have maps of one size.
  k->allows_small_blocks =
      C::kHasSmallBlocks && remote == nullptr && a.total_k <= kMostBlocks * kSmallBlockN;
  const uint32_t sizes[2] = {C::kBlockN, kSmallBlockN};
  for (int i = 0; i < (k->allows_small_blocks ? 2 : 1); ++i) {
    MAGI_RETURN(encode_map(&k->k_maps[i], type, a.k, {dq, tk, hk},
                           {2 * a.k_stride_token, 2 * a.k_stride_head}, {64, sizes[i], 1}, "k"));
    MAGI_RETURN(encode_map(&k->v_maps[i], type, a.v, {dv, tk, hk},
                           {2 * a.v_stride_token, 2 * a.v_stride_head}, {64, sizes[i], 1}, "v"));
  }
  MAGI_RETURN(remote_keys(remote, a.total_k, type, dq, dv, hk, C::kBlockN, &k->remote));
  if (!k->out_is_float)
    MAGI_RETURN(
        encode_map(&k->out_map, type, a.out, {dv, pack, tq, head_units},
                   {2 * a.out_stride_head, 2 * a.out_stride_token, 2 * a.out_stride_head * a.pack},
                   {64, (uint32_t)pack, group_tokens, 1}, "out"));
  else if (reinterpret_cast<uintptr_t>(a.out) % 8 || a.out_stride_token % 2 ||
           a.out_stride_head % 2)
    return fail(MAGI_INVALID_ARGUMENT,
                "A float32 out must begin at a multiple of 8 bytes and have even strides.");
  else
    k->out_map = k->q_map;  // prefetched, never used
  return MAGI_OK;
}

template <typename C>
int64_t fwd_workspace_bytes(const FwdSplits& splits, int head_units) {
  return 4ll * kPartialsAt +
         4ll * C::kGroups * splits.tiles * head_units * splits.parts * partial_floats<C>();
}

// `run` with the groups of the call's tile, as a constant.
template <int kD, int kDv, typename F>
magi_status with_tile(const magi_ffa_fwd_params& a, F run) {
  constexpr int kMany = fwd_groups(kDv), kFew = fwd_few_groups(kD, kDv);
  const int rows = a.tile_tokens * a.pack;
  if (64 % a.pack == 0 && rows == 64 * kMany) return run(std::integral_constant<int, kMany>{});
  if constexpr (kFew != 0)
    if (64 % a.pack == 0 && rows == 64 * kFew) return run(std::integral_constant<int, kFew>{});
  return fail(MAGI_INVALID_ARGUMENT,
              "pack %d times tile_tokens %d is not the tile of %d rows; ask magi_ffa_fwd_tile.",
              a.pack, a.tile_tokens, 64 * kMany);
}

template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_fwd_params& a, int64_t* bytes) {
  return with_tile<kD, kDv>(a, [&](auto groups) {
    using C = FwdConfig<T, kD, kDv, true, false, groups.value>;
    int sms = 0;
    MAGI_RETURN(multiprocessors(&sms));
    FwdSplits splits;
    MAGI_RETURN(fwd_splits(a, sms, (kPartialsAt - kArrivalsAt) / C::kGroups, &splits));
    *bytes = fwd_workspace_bytes<C>(splits, a.heads_q / a.pack);
    return MAGI_OK;
  });
}

template <typename C>
magi_status start_fwd(const magi_ffa_fwd_params& a, const magi_ffa_remote* remote,
                      FwdKernelParams& k, int64_t work_tiles, int sms) {
  constexpr int kMostKeys = kMostBlocks * C::kBlockN;
  if (a.total_k > kMostKeys)
    return fail(
        MAGI_UNSUPPORTED,
        "%d keys are more than the %d that one call takes at this head dim; give them in stages.",
        a.total_k, kMostKeys);
  MAGI_RETURN(fwd_maps<C>(a, remote, &k));
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([&] {
    return cudaFuncSetAttribute(ffa_fwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::smem_bytes(C::kBlockM));
  }));
  const int64_t work =
      work_tiles + static_cast<int64_t>(k.split_tiles) * k.head_units * (k.max_parts - 1);
  const int room = sms - a.sm_margin > 1 ? sms - a.sm_margin : 1;
  const int grid = work < room ? static_cast<int>(work) : room;
  const bool early = remote != nullptr;  // beside the put, which holds its multiprocessors already
  return launch_kernel(ffa_fwd<C>, dim3(grid), C::kThreads, C::smem_bytes(a.tile_tokens), a.stream,
                       k, "launching the forward kernel", early);
}

template <typename T, int kD, int kDv, int kGroups>
magi_status launch_tiles(const magi_ffa_fwd_params& a, const magi_ffa_remote* remote) {
  using C = FwdConfig<T, kD, kDv, true, false, kGroups>;
  FwdKernelParams k;
  fwd_scalars(a, kPartialsAt, &k);
  k.total_k = a.total_k;
  if (k.num_tiles == 0) return MAGI_OK;
  int sms = 0;
  int64_t work_tiles = 0;
  MAGI_RETURN(multiprocessors(&sms));
  MAGI_RETURN(count_work_tiles(k, &work_tiles));
  FwdSplits splits;
  MAGI_RETURN(fwd_splits(a, sms, (kPartialsAt - kArrivalsAt) / C::kGroups, &splits));
  splits.apply(&k);
  const int64_t need = fwd_workspace_bytes<C>(splits, k.head_units);
  MAGI_RETURN(check_workspace(a.workspace_bytes, need, "magi_ffa_fwd_workspace"));
  const bool plain = k.split_tiles == 0 && !k.has_softcap && k.sink_count == 0 && !k.out_is_float;
  if (a.has_dropout)
    return start_fwd<FwdConfig<T, kD, kDv, false, true, kGroups>>(a, remote, k, work_tiles, sms);
  if (plain) return start_fwd<C>(a, remote, k, work_tiles, sms);
  return start_fwd<FwdConfig<T, kD, kDv, false, false, kGroups>>(a, remote, k, work_tiles, sms);
}

template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_fwd_params& a, const magi_ffa_remote* remote) {
  return with_tile<kD, kDv>(
      a, [&](auto groups) { return launch_tiles<T, kD, kDv, groups.value>(a, remote); });
}

}  // namespace magi
