// SPDX-License-Identifier: Apache-2.0
// Host side of one backward variant: tensor maps, parameters of the kernels, the launches.
#pragma once

#include <cuda_runtime.h>

#include "ffa/common/host.h"
#include "ffa/sm90/bwd/kernel.cuh"
#include "ffa/sm90/bwd/maps.h"
#include "ffa/sm90/bwd/schedule/plan_semaphores.cuh"
#include "ffa/sm90/bwd/rows/postprocess_work_list.cuh"
#include "ffa/sm90/bwd/rows/postprocess_deterministic.cuh"
#include "ffa/sm90/bwd/rows/combine_partials.cuh"
#include "ffa/sm90/bwd/workspace.h"
#include "ffa/sm90/bwd/rows/preprocess_work_list.cuh"
#include "ffa/sm90/peer_kv.h"

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
magi_status bwd_maps(const magi_ffa_bwd_params& a, const magi_ffa_remote* remote,
                     BwdKernelParams* k) {
  const uint64_t keys = remote != nullptr ? remote->local_keys : a.total_k;
  MAGI_RETURN(operand_maps<C>(a, keys, k));
  const CUtensorMapDataType type = map_type(a.dtype);
  const uint64_t d = a.head_dim, dv = a.head_dim_v, tq = a.total_q, hq = a.heads_q;
  MAGI_RETURN(remote_keys(remote, a.total_k, type, d, dv, a.heads_kv, C::kBlockN, &k->remote));
  k->dq_map = k->q_map;
  if (a.direct_dq_store)
    MAGI_RETURN(encode_map(&k->dq_map, type, a.dq, {d, tq, hq},
                           {2ll * a.heads_q * a.head_dim, 2ll * a.head_dim}, {64, C::kBlockM, 1},
                           "dq"));
  if (k->grads_are_float) {
    k->dk_map = k->dv_map = k->k_map;  // never used
    return MAGI_OK;
  }
  return grad_maps(a, keys, k);
}

// Multiprocessors that a call may use.
inline int bwd_grid(const magi_ffa_bwd_params& a, int sms) {
  return sms - a.sm_margin > 1 ? sms - a.sm_margin : 1;
}

// The work list, and where work tiles that are split leave their parts, `partials` on.
template <typename C>
void set_work_list(const magi_ffa_bwd_params& a, const BwdWorkspace& w, int sms, float* partials,
                   BwdKernelParams* k, BwdRowParams* r) {
  k->work_list = r->work_list = a.work_list;
  k->completion = {};
  if (a.work_list != nullptr) {
    int32_t* left = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(a.workspace) + w.completion);
    k->completion = {left, left + kListedHeadSplits * bwd_tiles(a) * a.heads_kv};
  }
  k->prepare_groups = r->prepare_groups = prepare_groups(C::kBlockM) * bwd_grid(a, sms);
  r->late = magi_late_ctas(bwd_grid(a, sms));
  r->completion = k->completion;
  // Where a call takes a list and has none, tiles stay whole.
  const bool is_split = a.work_list != nullptr || !bwd_takes_work_list<C>(a, sms);
  const BwdSplit split = is_split ? bwd_split<C>(a, sms) : BwdSplit{};
  k->num_partials = split.slots;
  k->split_heads = a.heads_q / a.heads_kv / split.parts;
  k->dk_split = partials;
  k->dv_split = partials + split.parts * split.values(a.head_dim);
}

template <typename C>
magi_status check_work_list(const magi_ffa_bwd_params& a, bool is_remote, int sms) {
  if (a.work_list == nullptr || (bwd_takes_work_list<C>(a, sms) && !is_remote)) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT,
              "This call takes no work list: it has %lld tiles of %d kv heads, dq_mode %d and "
              "softcap %g%s%s; leave work_list NULL where magi_ffa_bwd_workspace says so.",
              static_cast<long long>(bwd_tiles(a)), a.heads_kv, a.dq_mode, a.softcap,
              a.has_dropout ? ", dropout" : "", is_remote ? ", and keys of other ranks" : "");
}

inline int log2_of(int power) {
  int log = 0;
  while (power >> (log + 1)) ++log;
  return log;
}

// What the caller says of split tiles, in deterministic order.
template <typename C>
magi_status check_deterministic_split(const magi_ffa_bwd_params& a, bool is_remote, int sms) {
  if (a.split_begin == 0 && a.split_end == 0 && a.splits_per_split_tile == 0) return MAGI_OK;
  if (!bwd_is_split_run(a))
    return fail(MAGI_INVALID_ARGUMENT,
                "The tiles from %d to before %d of %lld cannot be split into %d parts of the %d "
                "query heads of a kv head; give 2, 4 or 8 parts "
                "of 1, 2, 4 ... heads, of fewer than %d tiles.",
                a.split_begin, a.split_end, static_cast<long long>(bwd_tiles(a)),
                a.splits_per_split_tile, a.heads_q / a.heads_kv, kMaxPartials / a.heads_kv);
  if (is_remote || !bwd_has_deterministic_split<C>(a, sms))
    return fail(MAGI_INVALID_ARGUMENT,
                "Tiles are split where the caller says so only in deterministic order (dq_mode is "
                "%d), with steps of 80 (block_m is %d), of keys that are "
                "all there and at most %d tiles whose heads are not shared out anyway; leave "
                "split_begin, split_end and splits_per_split_tile 0.",
                a.dq_mode, a.block_m, kMaxTimed);
  return MAGI_OK;
}

inline magi_status check_direct_dq_store(const magi_ffa_bwd_params& a, bool is_remote) {
  if (!a.direct_dq_store || (bwd_can_store_direct(a) && !is_remote)) return MAGI_OK;
  return fail(MAGI_INVALID_ARGUMENT,
              "dq is written at once where a block has a direct visit (direct_dq_store) only in "
              "deterministic order or where the first writer stores (dq_mode is %d), "
              "in 16 bits (grad_dtype is %d), of keys that are all there, without accumulate (%d), "
              "softcap (%g), dropout (%d) or split tiles; leave direct_dq_store 0.",
              a.dq_mode, a.grad_dtype, a.accumulate, a.softcap, a.has_dropout);
}

// Where what is made of the plan lies: with the caller, if it gives room and this call fits, else
// in the workspace.
template <typename C>
void set_order(const magi_ffa_bwd_params& a, const BwdWorkspace& w, int sms, BwdKernelParams* k,
               BwdRowParams* r) {
  const BwdOrder o = bwd_order_layout<C>(a, k->num_head_splits, sms);
  const bool is_kept = a.dq_mode && a.order != nullptr && o.bytes <= bwd_bytes<C>(a, sms).order;
  uint8_t* at =
      is_kept ? static_cast<uint8_t*>(a.order) : static_cast<uint8_t*>(a.workspace) + w.order;
  r->order_is_made = is_kept && a.order_is_made;
  k->order = r->order = reinterpret_cast<int32_t*>(at);
  k->semaphore_targets = r->semaphore_targets =
      reinterpret_cast<int32_t*>(at + o.semaphore_targets);
  r->contributions_of_block = reinterpret_cast<int2*>(at + o.contributions_of_block);
  r->summed = reinterpret_cast<int32_t*>(at + o.summed);
  r->direct_dq_store = reinterpret_cast<int32_t*>(at + o.direct_dq_store);
  k->direct_dq_store = a.direct_dq_store ? r->direct_dq_store : nullptr;
  r->stores_direct = a.direct_dq_store;
}

// Where dq is summed in order. Behind the sizes and the work tiles, which it reads.
template <typename C>
void set_semaphores(const magi_ffa_bwd_params& a, const BwdWorkspace& w, int sms,
                    BwdKernelParams* k, BwdRowParams* r) {
  uint8_t* workspace = static_cast<uint8_t*>(a.workspace);
  r->splits_per_split_tile = bwd_deterministic_splits(a);
  r->split_ticks = kTicks / r->splits_per_split_tile;
  r->split_begin = r->splits_per_split_tile > 1 ? a.split_begin : 0;
  r->split_end = r->splits_per_split_tile > 1 ? a.split_end : 0;
  k->first_split = r->split_begin * a.heads_kv;
  k->parts_shift = log2_of(r->splits_per_split_tile);
  k->heads_shift = log2_of(a.heads_q / a.heads_kv / r->splits_per_split_tile);
  const int wave =
      bwd_tiles_at_once(a, bwd_grid(a, sms), k->heads_per_l2_group * k->splits_per_tile);
  k->wave = r->wave = wave < 1 ? 1 : wave > kMaxWave ? kMaxWave : wave;
  k->dq_semaphore = r->dq_semaphore =
      a.dq_mode ? reinterpret_cast<int32_t*>(workspace + w.dq_semaphore) : nullptr;
  k->first_writer = r->first_writer = a.dq_mode == MAGI_DQ_FIRST_WRITER;
  set_order<C>(a, w, sms, k, r);
  r->heads_per_l2_group = k->heads_per_l2_group;
  r->work_tiles_per_tile = k->work_tiles_per_tile =
      k->heads_per_l2_group * k->splits_per_tile * r->splits_per_split_tile;
  r->target_tables = bwd_target_tables<C>(a, k->num_head_splits, sms);
  k->targets_per_block = k->num_tiles * r->work_tiles_per_tile * r->target_tables;
  r->num_ctas = bwd_grid(a, sms) < kMaxWave ? bwd_grid(a, sms) : kMaxWave;
}

template <typename C>
void bwd_scalars(const magi_ffa_bwd_params& a, const magi_ffa_remote* remote, int sms,
                 BwdKernelParams* k, BwdRowParams* r) {
  // Gradients of remote keys leave at once, whole.
  k->num_head_splits = remote != nullptr ? 1 : bwd_num_head_splits<C>(a, sms);
  const BwdWorkspace w = bwd_layout<C>(a, k->num_head_splits, sms);
  uint8_t* workspace = static_cast<uint8_t*>(a.workspace);
  k->plan = r->plan = a.plan;
  k->workspace = r->workspace = reinterpret_cast<int32_t*>(workspace);
  k->stats = r->stats = reinterpret_cast<float*>(workspace + w.stats);
  k->dq_accum = r->dq_accum = reinterpret_cast<float*>(workspace + w.dq_accum);
  float* partials = reinterpret_cast<float*>(workspace + w.partials);
  const bool split = k->num_head_splits > 1;
  k->dk_stride_part = bwd_dk_values(a);
  k->dv_stride_part = bwd_dv_values(a);
  k->dk = split ? partials : a.dk;
  k->dv = split ? partials + k->num_head_splits * k->dk_stride_part : a.dv;
  set_work_list<C>(a, w, sms, partials, k, r);
  k->total_q = r->total_q = a.total_q;
  k->total_k = r->total_k = a.total_k;
  k->num_m_blocks = static_cast<int32_t>(bwd_num_m_blocks<C>(a));
  r->num_m_blocks = k->num_m_blocks * (C::kBlockM / C::kRowBlockM);
  k->heads_q = r->heads_q = a.heads_q;
  k->heads_kv = k->head_units = r->heads_kv = a.heads_kv;
  k->head_dim = r->head_dim = a.head_dim;
  k->head_dim_v = r->head_dim_v = a.head_dim_v;
  k->num_tiles = r->num_tiles = static_cast<int32_t>(bwd_tiles(a));
  k->heads_per_l2_group = bwd_heads_per_l2_group<C>(a, k->num_head_splits, sms);
  k->splits_per_tile = k->num_head_splits;
  k->work_tiles_per_l2_group = k->num_tiles * k->heads_per_l2_group * k->splits_per_tile;
  set_semaphores<C>(a, w, sms, k, r);
  k->group = a.heads_q / a.heads_kv;
  k->heads_per_split = r->heads_per_split = a.heads_q / a.heads_kv / k->num_head_splits;
  r->grads_are_float = a.grad_dtype == MAGI_FP32;
  r->accumulate = a.accumulate;
  k->grads_are_float = r->grads_are_float || split;
  k->accumulate = r->accumulate && !split;
  k->has_softcap = a.softcap > 0.f;
  k->scale = k->has_softcap ? a.softmax_scale / a.softcap : 1.f;
  k->scale_log2 = (k->has_softcap ? a.softcap : a.softmax_scale) * kLog2e;
  k->grad_scale = r->grad_scale = a.softmax_scale;
  r->out = a.out;
  r->dout = a.dout;
  r->lse = a.lse;
  r->delta = a.delta;
  r->dq = a.dq;
  r->out_stride_token = a.out_stride_token;
  r->out_stride_head = a.out_stride_head;
  r->dout_stride_token = a.dout_stride_token;
  r->dout_stride_head = a.dout_stride_head;
  r->dim_blocks = C::kAtoms;
  k->dropout = a.dropout != nullptr ? *a.dropout : magi_dropout{};
  r->dropout_log2_scale = a.dropout != nullptr ? log2f(a.dropout->scale) : 0.f;
  r->dropout_inverse_scale = a.dropout != nullptr ? 1.f / a.dropout->scale : 1.f;
  r->barrier = {};
  if (remote != nullptr)
    r->barrier = {remote->grads, remote->senders, remote->failed_peer,
                  remote->rank,  remote->world,   remote->timeout_ms};
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
  BwdCombineParams j{static_cast<const float*>(k.dk),
                     static_cast<const float*>(k.dv),
                     a.dk,
                     a.dv,
                     k.dk_stride_part,
                     k.dv_stride_part,
                     k.num_head_splits,
                     a.grad_dtype == MAGI_FP32,
                     a.accumulate};
  const int64_t most = j.dk_count > j.dv_count ? j.dk_count : j.dv_count;
  const dim3 grid(static_cast<uint32_t>((most / 4 + kRowThreads - 1) / kRowThreads));
  return launch_last(a, bwd_combine<T, kRowThreads>, grid, j,
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
                     "launching the sum of the parts of split work_tiles");
}

template <typename C>
magi_status start_variant(const magi_ffa_bwd_params& a, BwdKernelParams& k, int sms) {
  using T = typename C::T;
  if constexpr (!C::kIsWide && !C::kIsTight) {
    const bool is_general = bwd_is_general(a);
    if (a.dq_mode && is_general) return start_bwd<typename C::template With<true, true>>(a, k, sms);
    if (is_general) return start_bwd<typename C::template With<true, false>>(a, k, sms);
  }
  if constexpr (C::kBlockM != kBlockM128)
    if (a.dq_mode) return start_bwd<typename C::template With<false, true>>(a, k, sms);
  MAGI_RETURN(start_bwd<C>(a, k, sms));
  if constexpr (C::kSplit)
    if (k.num_partials > 0 && k.work_list == nullptr) return combine_split_work_tiles<T>(a, k, sms);
  return MAGI_OK;
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
  // The kernel counts blocks of queries and heads in 16 bits.
  constexpr int kMaxQueries = 65535 * C::kBlockM;
  if (a.total_q > kMaxQueries || a.heads_q > 32767)
    return fail(MAGI_UNSUPPORTED,
                "%d queries of %d heads are more than the %d of 32767 that one call takes; give "
                "them in stages.",
                a.total_q, a.heads_q, kMaxQueries);
  int64_t needs[5];
  MAGI_RETURN(bwd_workspace<C>(a, needs));
  const int64_t need = needs[0];
  MAGI_RETURN(check_workspace(a.workspace_bytes, need, "magi_ffa_bwd_workspace"));
  if (reinterpret_cast<uintptr_t>(a.workspace) % 128 ||
      reinterpret_cast<uintptr_t>(a.order) % 128 || reinterpret_cast<uintptr_t>(a.work_list) % 16)
    return fail(
        MAGI_INVALID_ARGUMENT,
        "The workspace and the order must lie at multiples of 128 bytes, the work list at a "
        "multiple of 16.");
  if (a.total_q == 0 || a.total_k == 0)
    return fail(MAGI_INVALID_ARGUMENT, "There are no queries or no keys.");
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  MAGI_RETURN(check_deterministic_split<C>(a, remote != nullptr, sms));
  MAGI_RETURN(check_direct_dq_store(a, remote != nullptr));
  MAGI_RETURN(check_work_list<C>(a, remote != nullptr, sms));
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

}  // namespace magi

#define MAGI_FFA_BWD_INSTANCE(TYPE, D, DV, STEM)                                                   \
  extern "C" magi_status magi_ffa_##STEM(const magi_ffa_bwd_params* params,                        \
                                         const magi_ffa_remote* remote) {                          \
    auto run = [&](auto config) { return magi::launch_bwd<decltype(config)>(*params, remote); };   \
    return magi::with_bwd_config<TYPE, D, DV>(*params, run);                                       \
  }                                                                                                \
  extern "C" magi_status magi_ffa_##STEM##_workspace(const magi_ffa_bwd_params* params,            \
                                                     int64_t* needs) {                             \
    auto run = [&](auto config) { return magi::bwd_workspace<decltype(config)>(*params, needs); }; \
    return magi::with_bwd_config<TYPE, D, DV>(*params, run);                                       \
  }
