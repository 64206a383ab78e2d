// SPDX-License-Identifier: Apache-2.0
// Host side of one backward variant: workspace, parameters, the launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "ffa/common/combine_heads.cuh"
#include "ffa/common/host.h"
#include "ffa/common/operands.h"
#include "ffa/common/variant_table.h"
#include "ffa/portable/budget.h"
#include "ffa/portable/bwd/kernel.cuh"
#include "planner/schedule/l2_groups.h"

namespace magi::portable {

template <typename C>
int64_t bwd_num_tiles(const magi_ffa_bwd_params& a) {
  return (static_cast<int64_t>(a.total_k) + C::kBlockN - 1) / C::kBlockN;
}

template <typename C>
int64_t bwd_num_m_blocks(const magi_ffa_bwd_params& a) {
  return (static_cast<int64_t>(a.total_q) + C::kBlockM - 1) / C::kBlockM;
}

// Among how many work tiles the query heads of a tile are shared out: as few as make four work
// tiles for each SM. In deterministic order all, up to 16: then CTAs that run side by side have few
// tiles of one head, and few wait for each other; but their parts of dk and dv take no more than a
// gigabyte, or than the sum of dq. The same on a device whatever is left free, so that sm_margin
// does not change results.
template <typename C>
int bwd_num_head_splits(const magi_ffa_bwd_params& a, int sms) {
  constexpr int kPerSm = 4, kMostInOrder = 16;
  const int group = a.heads_q / a.heads_kv;
  const bool in_order = a.dq_mode == MAGI_DQ_DETERMINISTIC;
  const int64_t work_tiles = bwd_num_tiles<C>(a) * a.heads_kv;
  const int64_t dq_bytes = 4ll * a.total_q * a.heads_q * C::kD;
  const int64_t of_split = 4ll * a.total_k * a.heads_kv * (a.head_dim + a.head_dim_v);
  int splits = 1;
  for (int more = 1; more <= group && (!in_order || more <= kMostInOrder); ++more) {
    if (group % more != 0) continue;
    if (in_order && more > 1 && more * of_split > std::max<int64_t>(1ll << 30, dq_bytes)) break;
    splits = more;
    if (!in_order && work_tiles * splits >= kPerSm * sms) break;
  }
  return splits;
}

inline int64_t whole_lines(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// Byte offsets into the workspace. What comes before `stats` is zero when the main kernel starts.
struct BwdWorkspace {
  int64_t semaphore, dq_accum, stats, partials, bytes;
};

inline int64_t bwd_dk_values(const magi_ffa_bwd_params& a) {
  return static_cast<int64_t>(a.total_k) * a.heads_kv * a.head_dim;
}
inline int64_t bwd_dv_values(const magi_ffa_bwd_params& a) {
  return static_cast<int64_t>(a.total_k) * a.heads_kv * a.head_dim_v;
}

template <typename C>
BwdWorkspace bwd_layout(const magi_ffa_bwd_params& a, int splits) {
  const int64_t blocks = bwd_num_m_blocks<C>(a) * a.heads_q;
  BwdWorkspace w;
  w.semaphore = 128;
  w.dq_accum = w.semaphore + whole_lines(a.dq_mode == MAGI_DQ_DETERMINISTIC ? 4 * blocks : 0);
  w.stats = w.dq_accum + 4ll * C::kBlockM * C::kD * blocks;
  w.partials = whole_lines(w.stats + C::kStatBytes * blocks);
  w.bytes = w.partials + (splits > 1 ? 4ll * splits * (bwd_dk_values(a) + bwd_dv_values(a)) : 0);
  return w;
}

template <typename C>
magi_status bwd_workspace(const magi_ffa_bwd_params& a, int64_t* needs) {
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  needs[0] = bwd_layout<C>(a, bwd_num_head_splits<C>(a, sms)).bytes;
  needs[1] = needs[2] = needs[3] = 0;
  needs[4] = 1;
  return MAGI_OK;
}

inline magi_status check_bwd_modes(const magi_ffa_bwd_params& a) {
  if (a.dq_mode == MAGI_DQ_FIRST_WRITER || a.work_list != nullptr || a.direct_dq_store ||
      a.num_head_splits || a.split_begin || a.split_end || a.splits_per_split_tile)
    return fail(MAGI_INVALID_ARGUMENT,
                "These kernels make their own schedule; leave work_list, direct_dq_store, "
                "num_head_splits and the split 0, and dq_mode atomic or deterministic.");
  return MAGI_OK;
}

template <typename C>
void bwd_scalars(const magi_ffa_bwd_params& a, int splits, BwdKernelParams* k) {
  const BwdWorkspace w = bwd_layout<C>(a, splits);
  uint8_t* workspace = static_cast<uint8_t*>(a.workspace);
  qkv_operands(a, k);
  k->out = a.out;
  k->dout = a.dout;
  k->out_stride_token = a.out_stride_token;
  k->out_stride_head = a.out_stride_head;
  k->dout_stride_token = a.dout_stride_token;
  k->dout_stride_head = a.dout_stride_head;
  k->lse = a.lse;
  k->delta = a.delta;
  k->plan = a.plan;
  k->counter = reinterpret_cast<int32_t*>(workspace);
  k->semaphore = a.dq_mode == MAGI_DQ_DETERMINISTIC
                     ? reinterpret_cast<int32_t*>(workspace + w.semaphore)
                     : nullptr;
  k->dq_accum = reinterpret_cast<float*>(workspace + w.dq_accum);
  k->stats = reinterpret_cast<float*>(workspace + w.stats);
  float* partials = reinterpret_cast<float*>(workspace + w.partials);
  k->dk_stride_part = bwd_dk_values(a);
  k->dv_stride_part = bwd_dv_values(a);
  k->dq = a.dq;
  k->dk = splits > 1 ? partials : a.dk;
  k->dv = splits > 1 ? partials + splits * k->dk_stride_part : a.dv;
  k->total_q = a.total_q;
  k->total_k = a.total_k;
  k->heads_q = a.heads_q;
  k->heads_kv = a.heads_kv;
  k->head_units = a.heads_kv * splits;
  k->head_dim = a.head_dim;
  k->head_dim_v = a.head_dim_v;
  k->num_tiles = static_cast<int32_t>(bwd_num_tiles<C>(a));
  k->num_m_blocks = static_cast<int32_t>(bwd_num_m_blocks<C>(a));
  k->group = a.heads_q / a.heads_kv;
  k->num_head_splits = splits;
  k->dq_is_float = a.grad_dtype == MAGI_FP32;
  k->dq_accumulate = a.accumulate;
  k->grads_are_float = k->dq_is_float || splits > 1;
  k->accumulate = a.accumulate && splits == 1;
  k->has_softcap = a.softcap > 0.f;
  k->scale = k->has_softcap ? a.softmax_scale / a.softcap : 1.f;
  k->scale_log2 = (k->has_softcap ? a.softcap : a.softmax_scale) * kLog2e;
  k->grad_scale = a.softmax_scale;
  k->dropout = a.dropout != nullptr ? *a.dropout : magi_dropout{};
  k->dropout_log2_scale = a.dropout != nullptr ? log2f(a.dropout->scale) : 0.f;
  k->dropout_inverse_scale = a.dropout != nullptr ? 1.f / a.dropout->scale : 1.f;
}

template <typename C>
magi_status start_bwd(const magi_ffa_bwd_params& a, const BwdKernelParams& k, int sms) {
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(ffa_bwd<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                C::kSmemBytes);
  }));
  int64_t work = 0;
  MAGI_RETURN(count_work_tiles(k, &work));
  const int room = C::kCtasPerSm * (sms - a.sm_margin > 1 ? sms - a.sm_margin : 1);
  const int grid = work < room ? static_cast<int>(work) : room;
  ffa_bwd<C><<<grid, C::kThreads, C::kSmemBytes, static_cast<cudaStream_t>(a.stream)>>>(k);
  return cuda_status(cudaGetLastError(), "launching the backward kernel");
}

template <typename C>
magi_status combine_head_splits(const magi_ffa_bwd_params& a, const BwdKernelParams& k) {
  using T = typename C::T;
  const BwdCombineParams c = combine_params(a, k);
  const uint32_t ctas = combine_ctas(c, kRowThreads);
  bwd_combine<T, kRowThreads><<<ctas, kRowThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(c);
  return cuda_status(cudaGetLastError(), "launching the sum of the heads' parts");
}

template <typename C>
magi_status launch_bwd(const magi_ffa_bwd_params& a) {
  MAGI_RETURN(check_bwd_modes(a));
  if (a.total_q == 0 || a.total_k == 0) return MAGI_OK;
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  BwdKernelParams k;
  const int splits = bwd_num_head_splits<C>(a, sms);
  const BwdWorkspace w = bwd_layout<C>(a, splits);
  MAGI_RETURN(check_workspace(a.workspace_bytes, w.bytes, "magi_ffa_bwd_workspace"));
  bwd_scalars<C>(a, splits, &k);
  k.heads_per_l2_group =
      portable_units_per_l2_group(k.num_tiles, k.head_units, k.semaphore != nullptr, sms);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  MAGI_RETURN(cuda_status(cudaMemsetAsync(a.workspace, 0, w.stats, stream), "clearing dq"));
  const dim3 rows(k.num_m_blocks, k.heads_q);
  bwd_preprocess<C><<<rows, kRowThreads, 0, stream>>>(k);
  MAGI_RETURN(cuda_status(cudaGetLastError(), "launching the start of the backward"));
  MAGI_RETURN(start_bwd<C>(a, k, sms));
  if (splits > 1) MAGI_RETURN(combine_head_splits<C>(a, k));
  bwd_postprocess<C><<<rows, C::kThreads, 0, stream>>>(k);
  return cuda_status(cudaGetLastError(), "launching the end of the backward");
}

// Calls `run` with the configuration for a call on the current device.
template <typename T, int kD, typename Run>
magi_status with_bwd_config(const magi_ffa_bwd_params& a, Run run) {
  return with_budget([&](auto small) {
    constexpr bool kSmall = decltype(small)::value;
    return a.has_dropout ? run(BwdConfig<T, kD, kSmall, true>{}) : run(BwdConfig<T, kD, kSmall>{});
  });
}

}  // namespace magi::portable

namespace magi {

template <typename T, int kD, int kDv>
magi_status launch_variant(const magi_ffa_bwd_params& a, const magi_ffa_remote*) {
  return portable::with_bwd_config<T, kD>(
      a, [&](auto config) { return portable::launch_bwd<decltype(config)>(a); });
}

template <typename T, int kD, int kDv>
magi_status variant_workspace(const magi_ffa_bwd_params& a, int64_t* needs) {
  return portable::with_bwd_config<T, kD>(
      a, [&](auto config) { return portable::bwd_workspace<decltype(config)>(a, needs); });
}

}  // namespace magi
