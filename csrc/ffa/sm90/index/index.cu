// SPDX-License-Identifier: Apache-2.0
// Entry points of index attention: checks of what no kernel may get wrong, the choice of the tile,
// and the two small kernels around the backward.
#include "magi/index.h"

#include "ffa/common/call_checks.h"
#include "ffa/sm90/index/bwd/delta.cuh"
#include "ffa/sm90/index/bwd/keys/workspace.h"
#include "ffa/sm90/index/bwd/sum_shares.cuh"
#include "ffa/sm90/index/fwd/blocks/config.h"
#include "ffa/sm90/index/mla/head_dims.h"
#include "ffa/sm90/index/work_tile.h"

#define MAGI_INDEX_VARIANT(KIND, TYPE, D, SYMBOL) \
  extern "C" magi_status SYMBOL(const magi_ffa_##KIND##_params*);
#include "inst/index_variants.inc"
#undef MAGI_INDEX_VARIANT

namespace magi {
namespace {

[[maybe_unused]] constexpr int32_t kDtype_bf16 = MAGI_BF16, kDtype_fp16 = MAGI_FP16;

// Are the values columns of k? Key-stationary kernels and those that copy blocks take values of
// their own,
// and questions for a workspace come without addresses.
template <typename Params>
bool is_mla(const Params&) {
  return false;
}
bool is_mla(const magi_ffa_index_fwd_params& p) { return p.v == nullptr; }
bool is_mla(const magi_ffa_index_bwd_params& p) { return p.v == nullptr; }

// The launcher with the smallest tile that holds both head dims; they are listed from small to
// large. Values that are columns of k have a tile of their own.
template <typename Params>
struct Launcher {
  const Params& p;
  magi_status (*found)(const Params*) = nullptr;
  int32_t tile_dim = 0;

  void offer(int32_t dtype, int32_t head_dim, magi_status (*launch)(const Params*)) {
    const int32_t wanted = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    if (found != nullptr || dtype != p.dtype || head_dim < wanted) return;
    if (is_mla(p) != (head_dim == kMlaHeadDim)) return;
    if (is_mla(p) && p.head_dim_v > kMlaHeadDimV) return;
    found = launch;
    tile_dim = head_dim;
  }
  template <typename Other>
  void offer(int32_t, int32_t, magi_status (*)(const Other*)) {}
};

template <typename Params>
Launcher<Params> find(const Params& p) {
  Launcher<Params> launcher{p};
#define MAGI_INDEX_VARIANT(KIND, TYPE, D, SYMBOL) launcher.offer(kDtype_##TYPE, D, SYMBOL);
#include "inst/index_variants.inc"
#undef MAGI_INDEX_VARIANT
  return launcher;
}

template <typename Params>
bool has(int32_t dtype, int32_t head_dim, int32_t head_dim_v, bool has_v) {
  Params p{};
  p.v = has_v ? &p : nullptr;
  p.dtype = dtype;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  return find(p).found != nullptr;
}

// What launches a problem; NULL with an error if this library has no kernel for it.
template <typename Params>
auto launcher(const Params& p, const char* direction) {
  const auto found = find(p).found;
  if (found == nullptr)
    fail(MAGI_UNSUPPORTED,
         "No kernel for the %s of index attention with head dims %d and %d in this library.",
         direction, p.head_dim, p.head_dim_v);
  return found;
}

template <typename Params>
magi_status check_index(const Params& p) {
  MAGI_RETURN(check_shapes(p.version, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v));
  if (p.q_block < 1 || p.k_block < 1)
    return fail(MAGI_INVALID_ARGUMENT, "q_block and k_block must be >= 1.");
  if (is_mla(p) && p.head_dim_v > p.head_dim)
    return fail(MAGI_INVALID_ARGUMENT, "%d columns of values in %d of keys: give at most as many.",
                p.head_dim_v, p.head_dim);
  if (!(p.softmax_scale > 0.f)) return fail(MAGI_INVALID_ARGUMENT, "softmax_scale must be > 0.");
  if (p.total_q < 0 || p.total_k < 0 || p.sm_margin < 0 || p.max_entries < 0)
    return fail(MAGI_INVALID_ARGUMENT, "total_q, total_k, max_entries and sm_margin must be >= 0.");
  // As GatheredTensor counts.
  const int64_t stride = p.k_stride_token > p.v_stride_token ? p.k_stride_token : p.v_stride_token;
  if (p.total_k * (stride / 8) >= 1ll << 32)
    return fail(MAGI_UNSUPPORTED,
                "%d keys that lie %lld elements apart are too far from each other.", p.total_k,
                static_cast<long long>(stride));
  if (static_cast<int64_t>(p.total_k) * p.heads_kv >= 1ll << 31)
    return fail(MAGI_UNSUPPORTED, "%d keys of %d kv heads are too many rows; split the keys.",
                p.total_k, p.heads_kv);
  if (static_cast<int64_t>(p.total_q) * p.heads_kv >= (1ll << 31) - (1 << 16))
    return fail(MAGI_UNSUPPORTED, "%d tokens of %d kv heads are too many lists; split the tokens.",
                p.total_q, p.heads_kv);
  return MAGI_OK;
}

magi_status check_index_blocks(const magi_ffa_index_fwd_blocks_params& p) {
  MAGI_RETURN(check_index(p));
  constexpr int kRows = 64;
  const int64_t group = p.heads_q / p.heads_kv;
  if (kRows % group || p.q_block * group % kRows || p.k_block % kLeastBoxRows)
    return fail(MAGI_UNSUPPORTED,
                "Blocks of %d queries, of %lld heads each, and %d keys: the forward that copies "
                "blocks takes heads that divide %d, multiples of %d rows and of %d keys.",
                p.q_block, static_cast<long long>(group), p.k_block, kRows, kRows, kLeastBoxRows);
  if (static_cast<int64_t>(p.total_q) * p.heads_q >= 1ll << 31)
    return fail(MAGI_UNSUPPORTED, "%d tokens of %d heads are too many rows; split the tokens.",
                p.total_q, p.heads_q);
  if (p.total_q == 0 || p.total_k == 0)
    return fail(MAGI_INVALID_ARGUMENT, "There are no queries or no keys.");
  return MAGI_OK;
}

magi_status check_index_keys(const magi_ffa_index_bwd_keys_params& p) {
  MAGI_RETURN(check_index(p));
  if (p.q_block % kBlockM64 || p.k_block % kGranule)
    return fail(MAGI_UNSUPPORTED,
                "Blocks of %d queries and %d keys: the key-stationary backward takes multiples of "
                "%d and of %d.",
                p.q_block, p.k_block, kBlockM64, kGranule);
  if (p.heads_q / p.heads_kv > kMostGroup || p.num_head_splits < 1)
    return fail(MAGI_INVALID_ARGUMENT,
                "%d query heads on a kv head in %d parts; give up to %d heads, and 1 part or more.",
                p.heads_q / p.heads_kv, p.num_head_splits, kMostGroup);
  const int64_t lists = ceil_div(p.total_q, p.q_block);
  if (lists > kMostQueryBlocks)
    return fail(MAGI_UNSUPPORTED, "%lld blocks of queries are more than %d; take larger ones.",
                static_cast<long long>(lists), kMostQueryBlocks);
  return MAGI_OK;
}

template <typename T>
magi_status write_delta(const magi_ffa_index_bwd_params& a) {
  const IndexDeltaParams k = index_delta_params(a);
  constexpr int kRows = kDeltaThreads / 32;
  return launch_kernel(index_delta_rows<T>, dim3((k.num_rows + kRows - 1) / kRows), kDeltaThreads,
                       0, a.stream, k, "launching the preprocess of index attention");
}

}  // namespace
}  // namespace magi

extern "C" {

int32_t magi_ffa_index_has_variant(int32_t dtype, int32_t head_dim, int32_t head_dim_v,
                                   int32_t has_v) {
  return magi::has<magi_ffa_index_fwd_params>(dtype, head_dim, head_dim_v, has_v) &&
         magi::has<magi_ffa_index_bwd_params>(dtype, head_dim, head_dim_v, has_v);
}

int32_t magi_ffa_index_tiles(int32_t heads_q, int32_t heads_kv, int32_t q_block, int32_t has_v) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0 || q_block < 1) return 0;
  magi::WorkTiles w;
  if (magi::work_tiles(q_block, heads_q, heads_kv, q_block, &w) != MAGI_OK) return 0;
  return w.tiles_of_list * (has_v ? 1 : w.groups);
}

magi_status magi_ffa_index_fwd(const magi_ffa_index_fwd_params* params) {
  MAGI_RETURN(magi::check_index(*params));
  const auto run = magi::launcher(*params, "forward");
  return run != nullptr ? run(params) : MAGI_UNSUPPORTED;
}

magi_status magi_ffa_index_fwd_blocks(const magi_ffa_index_fwd_blocks_params* params) {
  MAGI_RETURN(magi::check_index_blocks(*params));
  const auto run = magi::launcher(*params, "forward");
  return run != nullptr ? run(params) : MAGI_UNSUPPORTED;
}

magi_status magi_ffa_index_bwd(const magi_ffa_index_bwd_params* params) {
  const magi_ffa_index_bwd_params& p = *params;
  MAGI_RETURN(magi::check_index(p));
  const int64_t lists = (static_cast<int64_t>(p.total_q) + p.q_block - 1) / p.q_block;
  if (p.list_begin < 0 || p.list_begin > p.list_end || p.list_end > lists)
    return magi::fail(MAGI_INVALID_ARGUMENT, "Lists %d to %d are not among %lld.", p.list_begin,
                      p.list_end, static_cast<long long>(lists));
  if (static_cast<int64_t>(p.total_q) * p.heads_q >= 1ll << 31)
    return magi::fail(MAGI_UNSUPPORTED,
                      "%d tokens of %d heads are too many rows; split the tokens.", p.total_q,
                      p.heads_q);
  if (!magi::is_mla(p) && (p.dk_partials == nullptr) != (p.dv_partials == nullptr))
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "Give both of dk_partials and dv_partials or neither.");
  if (p.total_q == 0) return MAGI_OK;
  if (p.out != nullptr)
    MAGI_RETURN(p.dtype == MAGI_BF16 ? magi::write_delta<magi::bf16>(p)
                                     : magi::write_delta<magi::fp16>(p));
  const auto run = magi::launcher(p, "backward");
  return run != nullptr ? run(params) : MAGI_UNSUPPORTED;
}

magi_status magi_ffa_index_bwd_keys(const magi_ffa_index_bwd_keys_params* params) {
  MAGI_RETURN(magi::check_index_keys(*params));
  if (params->total_q == 0 || params->total_k == 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "There are no queries or no keys.");
  const auto run = magi::launcher(*params, "backward");
  return run != nullptr ? run(params) : MAGI_UNSUPPORTED;
}

magi_status magi_ffa_index_bwd_keys_workspace(const magi_ffa_index_bwd_keys_params* params,
                                              int64_t* bytes) {
  MAGI_RETURN(magi::check_index_keys(*params));
  int sms = 0;
  MAGI_RETURN(magi::multiprocessors(&sms));
  *bytes = magi::index_keys_layout(*params, sms, magi::find(*params).tile_dim).bytes;
  return MAGI_OK;
}

magi_status magi_ffa_index_sum(const magi_ffa_index_sum_params* params) {
  const magi_ffa_index_sum_params& p = *params;
  if (p.version != MAGI_ABI_VERSION || p.width < 4 || p.width % 4)
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "Rows of %d values, ABI version %d: rows are of a multiple of 4 values, and "
                      "the version is %d.",
                      p.width, p.version, MAGI_ABI_VERSION);
  if (p.total_k < 0 || p.heads_kv < 1 || p.k_block < 1 || p.max_entries < 0 || p.num_tiles < 1 ||
      p.list_begin < 0 || p.list_begin > p.list_end)
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "%d keys of %d kv heads in blocks of %d, lists %d to %d of %d entries in %d "
                      "tiles: none may be negative, and of heads, keys in a block and tiles there "
                      "is one or more.",
                      p.total_k, p.heads_kv, p.k_block, p.list_begin, p.list_end, p.max_entries,
                      p.num_tiles);
  const int64_t rows = static_cast<int64_t>(p.total_k) * p.heads_kv;
  const int64_t places = static_cast<int64_t>(p.list_end) * p.heads_kv * p.max_entries;
  if (rows >= 1ll << 31 || places >= 1ll << 31)
    return magi::fail(MAGI_UNSUPPORTED,
                      "%lld rows and %lld entries are too many; split the queries or the keys.",
                      static_cast<long long>(rows), static_cast<long long>(places));
  if (rows == 0 || places == 0) return MAGI_OK;
  constexpr int kRows = magi::kSumThreads / 32;
  return magi::launch_kernel(magi::index_sum_shares, dim3((rows + kRows - 1) / kRows),
                             magi::kSumThreads, 0, p.stream, p, "launching the sum of shares");
}
}
