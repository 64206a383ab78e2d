// SPDX-License-Identifier: Apache-2.0
// Entry points of the indexer's divergence over lists of keys: checks, and the choice of the tile.
#include "ffa/common/host.h"
#include "ffa/sm90/index/launch_resident.h"
#include "ffa/sm90/indexer_kl/bwd/kernel.cuh"
#include "ffa/sm90/indexer_kl/fwd/kernel.cuh"
#include "magi/index.h"

namespace magi {
namespace {

constexpr int kMostIndexDim = 128;

// `a` are the parameters of either direction, whose head_dim_index is that of the indexer.
template <typename Params>
magi_status check_indexer_kl(const Params& a) {
  if (a.version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", a.version,
                MAGI_ABI_VERSION);
  if (a.dtype != MAGI_BF16 && a.dtype != MAGI_FP16)
    return fail(MAGI_INVALID_ARGUMENT, "dtype %d is neither bfloat16 nor float16.", a.dtype);
  if (a.heads_index < 1 || a.heads_index > kKlHeads || a.head_dim_index < 8 ||
      a.head_dim_index > kMostIndexDim || a.head_dim_index % 8 != 0)
    return fail(MAGI_UNSUPPORTED,
                "%d index heads of %d columns: give 1 to %d heads and a multiple of 8 up to %d "
                "columns.",
                a.heads_index, a.head_dim_index, kKlHeads, kMostIndexDim);
  if (a.total_q < 0 || a.total_k < 0 || a.max_entries < 0 || a.sm_margin < 0)
    return fail(MAGI_INVALID_ARGUMENT,
                "%d queries, %d keys, %d entries and %d SMs to leave free: none may be negative.",
                a.total_q, a.total_k, a.max_entries, a.sm_margin);
  // As GatheredTensor counts.
  if (a.total_k * (a.k_index_stride_token / 8) >= 1ll << 32)
    return fail(MAGI_UNSUPPORTED, "%d keys that lie %lld elements apart are too far apart.",
                a.total_k, static_cast<long long>(a.k_index_stride_token));
  return MAGI_OK;
}

// The map of queries (columns, heads, tokens), in boxes of all heads of a query.
magi_status heads_map(CUtensorMap* map, int32_t dtype, const void* base, int32_t head_dim,
                      int32_t heads, int32_t total_q, int64_t stride_token, int64_t stride_head,
                      uint32_t box_heads, const char* name) {
  const auto type =
      dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto size = [](int32_t x) { return static_cast<uint64_t>(x); };
  return encode_map(map, type, base, {size(head_dim), size(heads), size(total_q)},
                    {2 * stride_head, 2 * stride_token}, {64, box_heads, 1}, name);
}

template <typename Params>
magi_status set_index(const Params& a, IndexerOperands* k) {
  k->k = gathered_tensor(a.k_index, a.k_index_stride_token, 0, a.head_dim_index);
  k->lists = {a.lists, a.counts, nullptr, 1, a.max_entries, 1};
  k->weights = a.weights;
  k->total_q = a.total_q;
  k->heads = a.heads_index;
  k->head_dim = a.head_dim_index;
  return heads_map(&k->q_map, a.dtype, a.q_index, a.head_dim_index, a.heads_index, a.total_q,
                   a.q_index_stride_token, a.q_index_stride_head, kKlHeads, "q_index");
}

int atoms_of(int32_t head_dim) { return (head_dim + 63) / 64; }

template <typename T, int kHeads>
magi_status launch_kl_fwd(const magi_ffa_indexer_kl_fwd_params& a) {
  using C = IndexerKlFwdConfig<T, kHeads>;
  if (a.heads_kv > C::kMostHeadsKv || a.heads_kv * atoms_of(a.head_dim) > C::kMostAtoms)
    return fail(MAGI_UNSUPPORTED,
                "%d kv heads of %d columns: with %d query heads on one, give up to %d of up to %d "
                "columns in all.",
                a.heads_kv, a.head_dim, a.heads_q / a.heads_kv, C::kMostHeadsKv,
                64 * C::kMostAtoms);
  IndexerKlFwdParams k{};
  MAGI_RETURN(set_index(a, &k.index));
  MAGI_RETURN(heads_map(&k.q_map, a.dtype, a.q, a.head_dim, a.heads_q, a.total_q, a.q_stride_token,
                        a.q_stride_head, kHeads, "q"));
  k.k = gathered_tensor(a.k, a.k_stride_token, 0, a.heads_kv * a.head_dim);
  k.lse = a.lse;
  k.scale_log2 = a.softmax_scale * kLog2e;
  k.heads_q = a.heads_q;
  k.heads_kv = a.heads_kv;
  k.index_atoms = atoms_of(a.head_dim_index);
  k.atoms = atoms_of(a.head_dim);
  k.targets = a.targets;
  k.divergence = a.divergence;
  k.lse_index = a.lse_index;
  k.mass = a.mass;
  return launch_resident<C, indexer_kl_fwd<C>>(a, a.total_q, k,
                                               "launching the forward of the indexer's divergence");
}

template <typename T, int kD>
magi_status launch_kl_bwd(const magi_ffa_indexer_kl_bwd_params& a) {
  using C = IndexerKlBwdConfig<T, kD>;
  IndexerKlBwdParams k{};
  MAGI_RETURN(set_index(a, &k.index));
  MAGI_RETURN(heads_map(&k.dq_map, a.dtype, a.dq_index, a.head_dim_index, a.heads_index, a.total_q,
                        static_cast<int64_t>(a.heads_index) * a.head_dim_index, a.head_dim_index,
                        kKlHeads, "dq_index"));
  k.targets = a.targets;
  k.lse_index = a.lse_index;
  k.mass = a.mass;
  k.grad = a.grad;
  k.dq = a.dq_index;
  k.dk = a.dk_index;
  k.dk_partials = a.dk_partials;
  k.dweights = a.dweights;
  k.query_begin = a.query_begin;
  k.num_queries = a.query_end - a.query_begin;
  return launch_resident<C, indexer_kl_bwd<C>>(
      a, k.num_queries, k, "launching the backward of the indexer's divergence");
}

template <typename T>
magi_status choose_kl_fwd(const magi_ffa_indexer_kl_fwd_params& a) {
  const int group = a.heads_q / a.heads_kv;
  if (group <= 16) return launch_kl_fwd<T, 16>(a);
  return group <= 64 ? launch_kl_fwd<T, 64>(a) : launch_kl_fwd<T, 128>(a);
}

template <typename T>
magi_status choose_kl_bwd(const magi_ffa_indexer_kl_bwd_params& a) {
  return a.head_dim_index <= 64 ? launch_kl_bwd<T, 64>(a) : launch_kl_bwd<T, 128>(a);
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_ffa_indexer_kl_fwd(const magi_ffa_indexer_kl_fwd_params* params) {
  using namespace magi;
  const magi_ffa_indexer_kl_fwd_params& a = *params;
  MAGI_RETURN(check_indexer_kl(a));
  if (a.heads_kv < 1 || a.heads_q < 1 || a.heads_q % a.heads_kv != 0 || a.heads_q > kKlMostHeads ||
      a.head_dim < 8 || a.head_dim % (a.heads_kv == 1 ? 8 : 64) != 0)
    return fail(
        MAGI_UNSUPPORTED,
        "%d query heads on %d kv heads of %d columns: give 1 to %d heads, a multiple of the "
        "kv heads, and a multiple of 8 columns, of 64 for several kv heads.",
        a.heads_q, a.heads_kv, a.head_dim, kKlMostHeads);
  if (a.total_k * (a.k_stride_token / 8) >= 1ll << 32)
    return fail(MAGI_UNSUPPORTED, "%d keys that lie %lld elements apart are too far apart.",
                a.total_k, static_cast<long long>(a.k_stride_token));
  if (a.total_q == 0) return MAGI_OK;
  return a.dtype == MAGI_BF16 ? choose_kl_fwd<bf16>(a) : choose_kl_fwd<fp16>(a);
}

magi_status magi_ffa_indexer_kl_bwd(const magi_ffa_indexer_kl_bwd_params* params) {
  using namespace magi;
  const magi_ffa_indexer_kl_bwd_params& a = *params;
  MAGI_RETURN(check_indexer_kl(a));
  if (a.query_begin < 0 || a.query_begin > a.query_end || a.query_end > a.total_q)
    return fail(MAGI_INVALID_ARGUMENT, "Queries %d to %d are not among %d.", a.query_begin,
                a.query_end, a.total_q);
  if (static_cast<int64_t>(a.query_end - a.query_begin) * a.max_entries >= 1ll << 31 &&
      a.dk_partials != nullptr)
    return fail(MAGI_UNSUPPORTED, "%d queries with %d keys leave too many shares; give fewer.",
                a.query_end - a.query_begin, a.max_entries);
  if (a.query_begin == a.query_end) return MAGI_OK;
  return a.dtype == MAGI_BF16 ? choose_kl_bwd<bf16>(a) : choose_kl_bwd<fp16>(a);
}
}
