// SPDX-License-Identifier: Apache-2.0
// Host side of one backward variant: the launches. What a call may ask for is in
// bwd/launch/check_arguments.h, how parameters of kernels are set in bwd/launch/set_params.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "ffa/common/host.h"
#include "ffa/common/variant_table.h"
#include "ffa/sm90/bwd/kernel.cuh"
#include "ffa/sm90/bwd/launch/check_arguments.h"
#include "ffa/sm90/bwd/launch/set_params.cuh"
#include "ffa/sm90/bwd/rows/combine_partials.cuh"
#include "ffa/sm90/bwd/rows/postprocess_deterministic.cuh"
#include "ffa/sm90/bwd/rows/postprocess_work_list.cuh"
#include "ffa/sm90/bwd/rows/preprocess_work_list.cuh"
#include "ffa/sm90/bwd/schedule/plan_semaphores.cuh"
#include "ffa/sm90/bwd/workspace.h"

namespace magi {

template <typename C>
magi_status bwd_workspace(const magi_ffa_bwd_params& a, int64_t* needs) {
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  const BwdBytes bytes = bwd_bytes<C>(a, sms);
  needs[0] = bytes.workspace;
  needs[1] = bytes.order;
  needs[2] = bwd_takes_work_list<C>(a, sms);
  const BwdSplit tail = needs[2] ? BwdSplit{} : bwd_last_round<C>(a, sms);
  needs[3] = tail.slots;
  needs[4] = tail.parts;
  return MAGI_OK;
}

template <typename C>
magi_status start_bwd(const magi_ffa_bwd_params& a, BwdKernelParams& k, int sms) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(ffa_bwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int64_t work_tiles =
      static_cast<int64_t>(k.num_tiles) * k.head_units * k.splits_per_tile * C::kPasses;
  if (C::kSplit && k.work_list == nullptr)
    work_tiles += k.num_partials * (static_cast<int64_t>(k.heads_per_split) / k.split_heads - 1);
  if (work_tiles >= (1ll << 31) - (1 << 16))
    return fail(MAGI_UNSUPPORTED, "%lld tiles are too many; split the heads.",
                static_cast<long long>(work_tiles));
  k.num_work_tiles = static_cast<int32_t>(work_tiles);
  const int room = bwd_grid(a, sms);
  const int grid = work_tiles < room ? static_cast<int>(work_tiles) : room;
  return launch_behind(ffa_bwd<C>, dim3(grid), C::kThreads, C::kSmemBytes, a.stream, k,
                       "launching the backward kernel");
}

// A kernel over rows, which may start while the one before in the stream is ending if it is
// `beside` that.
template <typename Params>
magi_status launch_rows(void (*kernel)(Params), dim3 grid, bool beside, void* stream,
                        const Params& params, const char* doing) {
  return launch_kernel(kernel, grid, kRowThreads, 0, stream, params, doing, beside);
}

// The same behind the main kernel. CTAs that wait for that take the first multiprocessors that are
// free, for as long as it runs: so not where some are to be left to others.
template <typename Params>
magi_status launch_last(const magi_ffa_bwd_params& a, void (*kernel)(Params), dim3 grid,
                        const Params& params, const char* doing) {
  return launch_rows(kernel, grid, a.sm_margin == 0, a.stream, params, doing);
}

template <typename T>
magi_status combine_splits(const magi_ffa_bwd_params& a, const BwdKernelParams& k) {
  const BwdCombineParams c = combine_params(a, k);
  return launch_last(a, bwd_combine<T, kRowThreads>, dim3(combine_ctas(c, kRowThreads)), c,
                     "launching the sum of the heads' parts");
}

inline BwdCombinePartialsParams combine_partials_params(const magi_ffa_bwd_params& a,
                                                        const BwdKernelParams& k) {
  const BwdSplit split{k.num_partials, k.heads_per_split / k.split_heads};
  const BwdCombineParams combine{k.dk_split,
                                 k.dv_split,
                                 a.dk,
                                 a.dv,
                                 split.values(a.head_dim),
                                 split.values(a.head_dim_v),
                                 split.parts,
                                 k.grads_are_float,
                                 a.accumulate};
  const int is_deterministic = a.dq_mode != MAGI_DQ_ATOMIC,
            first = is_deterministic ? k.first_split : k.num_tiles * k.head_units - k.num_partials;
  return {a.plan,      k.work_list,          combine,      a.total_q,    a.total_k,
          first,       a.heads_kv,           a.head_dim,   a.head_dim_v, is_deterministic,
          k.num_tiles, k.heads_per_l2_group, k.head_units, k.remote};
}

template <typename T>
magi_status combine_split_work_tiles(const magi_ffa_bwd_params& a, const BwdKernelParams& k,
                                     int sms) {
  return launch_last(a, bwd_combine_partials<T>, dim3(8 * sms), combine_partials_params(a, k),
                     "launching the sum of the partials of split work tiles");
}

template <typename C>
magi_status start_variant(const magi_ffa_bwd_params& a, BwdKernelParams& k, int sms) {
  using T = typename C::T;
  if constexpr (!C::kIsWide && !C::kIsTight)
    if (bwd_is_general(a)) return start_bwd<typename C::template With<true, true>>(a, k, sms);
  if constexpr (C::kIsForGeneral) {
    return fail(MAGI_UNSUPPORTED, "These kernels are for calls with softcap or dropout.");
  } else {
    if constexpr (C::kBlockM != kBlockM128)
      if (a.dq_mode) return start_bwd<typename C::template With<false, true>>(a, k, sms);
    MAGI_RETURN(start_bwd<C>(a, k, sms));
    if constexpr (C::kSplit)
      if (k.num_partials > 0 && k.work_list == nullptr)
        return combine_split_work_tiles<T>(a, k, sms);
    return MAGI_OK;
  }
}

template <typename C>
magi_status start_work_list_rows(const magi_ffa_bwd_params& a, const BwdRowParams& r,
                                 const CUtensorMap& do_map, const char* doing) {
  static DeviceOnce configured;
  const auto prepare = bwd_preprocess_work_list<typename C::T, C::kBlockM>;
  using Shape = PreprocessShape<C::kBlockM>;
  MAGI_RETURN(configured.run([&] {
    return cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSmem);
  }));
  BwdPreprocessParams p{r, do_map, do_map};
  if (a.out != nullptr)
    MAGI_RETURN(encode_map(
        &p.out_map,
        a.dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        a.out,
        {static_cast<uint64_t>(a.head_dim_v), static_cast<uint64_t>(a.total_q),
         static_cast<uint64_t>(a.heads_q)},
        {2 * a.out_stride_token, 2 * a.out_stride_head}, {64, C::kBlockM, 1}, "out"));
  return launch_behind(prepare, dim3(r.prepare_groups / Shape::kGroups), Shape::kThreads,
                       Shape::kSmem, a.stream, p, doing);
}

// What comes before the main kernel: the rows of queries, and ahead of them a CTA that plans the
// semaphore targets, or resets counters where there is a work list.
template <typename C>
magi_status start_rows(const magi_ffa_bwd_params& a, const BwdKernelParams& k,
                       const BwdRowParams& r, bool beside) {
  using T = typename C::T;
  const char* doing = "launching the start of the backward";
  if constexpr (C::kIsMedium)
    if (r.work_list != nullptr) {
      MAGI_RETURN(
          launch_rows(bwd_reset_counters<kRowThreads>, dim3(1), beside, a.stream, r, doing));
      return start_work_list_rows<C>(a, r, k.do_map, doing);
    }
  const dim3 rows(r.num_m_blocks, k.heads_q), counting(r.num_m_blocks, k.heads_q + 1);
  if (!a.dq_mode)
    return launch_rows(bwd_preprocess<T, C::kRowBlockM, Contributions::kNotCounted>, rows, beside,
                       a.stream, r, doing);
  if (r.order_is_made)
    return launch_rows(bwd_preprocess<T, C::kRowBlockM, Contributions::kKnown>, rows, beside,
                       a.stream, r, doing);
  MAGI_RETURN(launch_rows(bwd_plan_semaphores<kRowThreads, C::kRowBlockM>, dim3(1), beside,
                          a.stream, r, "launching the plan of the semaphores"));
  return launch_rows(bwd_preprocess<T, C::kRowBlockM, Contributions::kCounted>, counting, true,
                     a.stream, r, doing);
}

template <typename C>
magi_status launch_bwd(const magi_ffa_bwd_params& a, const magi_ffa_remote* remote) {
  using T = typename C::T;
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  MAGI_RETURN(check_arguments<C>(a, remote != nullptr, sms));
  BwdKernelParams k;
  BwdRowParams r;
  bwd_scalars<C>(a, remote, sms, &k, &r);
  MAGI_RETURN(bwd_maps<C>(a, remote, &k));
  // Beside the put of remote keys, which holds its multiprocessors already; else behind whatever
  // comes before.
  const bool beside = remote != nullptr;
  MAGI_RETURN(start_rows<C>(a, k, r, beside));
  MAGI_RETURN(start_variant<C>(a, k, sms));
  const char* doing = "launching the end of the backward";
  if (a.dq_mode) {
    const int64_t items = static_cast<int64_t>(r.num_m_blocks) * k.heads_q * r.dim_blocks,
                  most = postprocess_deterministic_ctas(C::kRowBlockM) * sms;
    const dim3 grid(static_cast<uint32_t>(std::min<int64_t>((items + 1) / 2, most)));
    MAGI_RETURN(launch_last(a, bwd_postprocess_deterministic<T, C::kRowBlockM>, grid, r, doing));
    if constexpr (C::kIsWide)
      if (k.num_partials > 0) return combine_split_work_tiles<T>(a, k, sms);
    return k.num_head_splits > 1 ? combine_splits<T>(a, k) : MAGI_OK;
  }
  if (k.num_head_splits > 1) MAGI_RETURN(combine_splits<T>(a, k));
  if constexpr (C::kIsMedium)
    if (r.work_list != nullptr)
      return launch_last(
          a, bwd_postprocess_work_list<T, C::kBlockM>,
          dim3(postprocess_work_list_ctas(C::kBlockM) * sms),
          BwdPostprocessParams{r, combine_partials_params(a, k), k.group / kListedHeadSplits},
          doing);
  return launch_last(a, bwd_postprocess<T, C::kRowBlockM>, dim3(r.num_m_blocks, k.heads_q), r,
                     doing);
}

// Calls `run` with the configuration for a call of head dims up to kD and kDv.
template <typename T, int kD, int kDv, typename Run>
magi_status with_bwd_config(const magi_ffa_bwd_params& a, Run run) {
  if (a.block_m == kBlockM64) {
    if constexpr (kD + kDv <= 256) {
      return run(BwdConfig<T, kD, kDv>{});
    } else {
      // Softcap and dropout need registers that dk and dv of all columns would take.
      if constexpr (kD + kDv <= 320)
        if (!bwd_is_general(a)) return run(BwdConfig<T, kD, kDv>{});
      return run(BwdConfig<T, kD, kDv, false, false, kBlockM64, 2>{});
    }
  }
  if constexpr (kD > 64 && kD <= 128)
    if (a.block_m == kBlockM80 && !bwd_is_general(a))
      return run(BwdConfig<T, kD, kDv, false, false, kBlockM80>{});
  if constexpr (kD == 64 && kDv == 64)
    if (a.block_m == kBlockM128 && !bwd_is_general(a) && !a.dq_mode)
      return run(BwdConfig<T, kD, kDv, false, false, kBlockM128>{});
  return fail(
      MAGI_UNSUPPORTED,
      "block_m is %d; give %d, or without softcap or dropout %d for head dims of 65 to 128, "
      "or %d for smaller ones and dq_mode 0.",
      a.block_m, kBlockM64, kBlockM80, kBlockM128);
}

template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_bwd_params& a, const magi_ffa_remote* remote) {
  return with_bwd_config<T, kD, kDv>(
      a, [&](auto config) { return launch_bwd<decltype(config)>(a, remote); });
}

template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_bwd_params& a, int64_t* needs) {
  return with_bwd_config<T, kD, kDv>(
      a, [&](auto config) { return bwd_workspace<decltype(config)>(a, needs); });
}

}  // namespace magi
