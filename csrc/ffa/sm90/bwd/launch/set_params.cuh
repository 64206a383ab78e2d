// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernels of a backward, from those of the call: tensor maps, places in the
// workspace, sizes and scalars.
#pragma once

#include "ffa/common/host.h"
#include "ffa/common/scores.cuh"
#include "ffa/sm90/bwd/launch/maps.h"
#include "ffa/sm90/bwd/params.h"
#include "ffa/sm90/bwd/rows/preprocess_work_list.cuh"
#include "ffa/sm90/bwd/workspace.h"
#include "ffa/sm90/peer_kv.h"

namespace magi {

// Multiprocessors that a call may use.
inline int bwd_grid(const magi_ffa_bwd_params& a, int sms) {
  return sms - a.sm_margin > 1 ? sms - a.sm_margin : 1;
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

inline int log2_of(int power) {
  int log = 0;
  while (power >> (log + 1)) ++log;
  return log;
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
  k->heads_per_split = r->heads_per_split = k->group / k->num_head_splits;
  k->longer_splits = k->group % k->num_head_splits;
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

}  // namespace magi
