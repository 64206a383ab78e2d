// SPDX-License-Identifier: Apache-2.0
// Host side of one forward variant: checks and launch.
#pragma once

#include <cuda_runtime.h>

#include "ffa/common/fwd_scalars.h"
#include "ffa/common/host.h"
#include "ffa/common/operands.h"
#include "ffa/common/variant_table.h"
#include "ffa/portable/budget.h"
#include "ffa/portable/fwd/kernel.cuh"

namespace magi::portable {

// Into how many parts a tile may be cut: only where there is an SM for each part. The
// same on a device whatever is left free, so that sm_margin does not change results.
inline int fwd_max_parts(int64_t work_tiles, int sms) {
  if (work_tiles < 1 || work_tiles >= sms || kArrivalsAt + work_tiles > kPartialsAt) return 1;
  const int64_t parts = sms / work_tiles;
  return parts < kMaxParts ? static_cast<int>(parts) : kMaxParts;
}

template <typename C>
int64_t fwd_workspace_bytes(int64_t work_tiles, int parts) {
  return 4ll * kPartialsAt +
         (parts > 1 ? 8ll * work_tiles * parts * pairs_of_part<C>() * C::kThreads : 0);
}

inline int64_t fwd_num_tiles(const magi_ffa_fwd_params& a) {
  return (static_cast<int64_t>(a.total_q) + a.tile_tokens - 1) / a.tile_tokens;
}

template <typename C>
magi_status fwd_workspace(const magi_ffa_fwd_params& a, int64_t* bytes) {
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const int64_t work_tiles = fwd_num_tiles(a) * (a.heads_q / a.pack);
  *bytes = fwd_workspace_bytes<C>(work_tiles, fwd_max_parts(work_tiles, sms));
  return MAGI_OK;
}

inline int log2_of(int power) {
  int log = 0;
  while (power >> (log + 1)) ++log;
  return log;
}

inline void fwd_operands(const magi_ffa_fwd_params& a, FwdKernelParams* k) {
  qkv_operands(a, k);
  k->total_k = a.total_k;
  k->head_dim = a.head_dim;
  k->pack_log2 = log2_of(a.pack);
}

inline magi_status check_fwd_layout(const magi_ffa_fwd_params& a) {
  if (a.tile_tokens * a.pack != 128 || (a.pack & (a.pack - 1)) != 0)
    return fail(MAGI_INVALID_ARGUMENT,
                "pack %d times tile_tokens %d is not the tile of 128 rows; ask magi_ffa_fwd_tile.",
                a.pack, a.tile_tokens);
  const int multiple = a.out_dtype == MAGI_FP32 ? 2 : 8;
  if (reinterpret_cast<uintptr_t>(a.out) % (2 * multiple + (multiple == 2 ? 4 : 0)) ||
      a.out_stride_token % multiple || a.out_stride_head % multiple)
    return fail(MAGI_INVALID_ARGUMENT,
                "out must begin at a multiple of 16 bytes (8 if float32) and have strides that are "
                "multiples of %d elements.",
                multiple);
  return MAGI_OK;
}

template <typename C>
magi_status launch_fwd(const magi_ffa_fwd_params& a) {
  MAGI_RETURN(check_fwd_layout(a));
  FwdKernelParams k;
  fwd_scalars(a, kPartialsAt, &k);
  fwd_operands(a, &k);
  if (k.num_tiles == 0) return MAGI_OK;
  int sms = 0;
  int64_t work_tiles = 0;
  MAGI_RETURN(multiprocessors(&sms));
  MAGI_RETURN(count_work_tiles(k, &work_tiles));
  k.max_parts = fwd_max_parts(work_tiles, sms);
  const int64_t need = fwd_workspace_bytes<C>(work_tiles, k.max_parts);
  MAGI_RETURN(check_workspace(a.workspace_bytes, need, "magi_ffa_fwd_workspace"));
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(ffa_fwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::smem_bytes(C::kBlockM));
  }));
  // A margin of SMs is room for so many CTAs fewer.
  const int64_t work = work_tiles * k.max_parts;
  const int room = C::kCtasPerSm * (sms - a.sm_margin > 1 ? sms - a.sm_margin : 1);
  const int grid = work < room ? static_cast<int>(work) : room;
  ffa_fwd<C>
      <<<grid, C::kThreads, C::smem_bytes(a.tile_tokens), static_cast<cudaStream_t>(a.stream)>>>(k);
  return cuda_status(cudaGetLastError(), "launching the forward kernel");
}

// Calls `run` with the configuration for a call on the current device.
template <typename T, int kD, int kDv, typename Run>
magi_status with_fwd_config(const magi_ffa_fwd_params& a, Run run) {
  return with_budget([&](auto small) {
    constexpr bool kSmall = decltype(small)::value;
    return a.has_dropout ? run(FwdConfig<T, kD, kDv, kSmall, true>{})
                         : run(FwdConfig<T, kD, kDv, kSmall>{});
  });
}

}  // namespace magi::portable

namespace magi {

template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_fwd_params& a, const magi_ffa_remote*) {
  return portable::with_fwd_config<T, kD, kDv>(
      a, [&](auto config) { return portable::launch_fwd<decltype(config)>(a); });
}

template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_fwd_params& a, int64_t* bytes) {
  return portable::with_fwd_config<T, kD, kDv>(
      a, [&](auto config) { return portable::fwd_workspace<decltype(config)>(a, bytes); });
}

}  // namespace magi
