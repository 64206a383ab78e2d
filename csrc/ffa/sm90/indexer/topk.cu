// SPDX-License-Identifier: Apache-2.0
// The entries of the indexer: scores and the best keys, or blocks of keys, of some queries at a
// time, so that the scores of all are never in memory.
#include "ffa/common/host.h"
#include "ffa/sm90/indexer/best.cuh"
#include "ffa/sm90/indexer/best_blocks.cuh"
#include "ffa/sm90/indexer/scores.cuh"
#include "magi/index.h"

namespace magi {
namespace {

constexpr int kMostHeads = 64, kMostIndexDim = 128, kMostBest = 4096;

magi_status check_indexer(const magi_ffa_indexer_params& p) {
  if (p.version != MAGI_ABI_VERSION)
    return fail(MAGI_INVALID_ARGUMENT,
                "params have ABI version %d and this library %d; rebuild the kernels.", p.version,
                MAGI_ABI_VERSION);
  if (p.dtype != MAGI_BF16 && p.dtype != MAGI_FP16)
    return fail(MAGI_INVALID_ARGUMENT, "dtype %d is neither bfloat16 nor float16.", p.dtype);
  if (p.heads < 1 || p.heads > kMostHeads || p.head_dim < 8 || p.head_dim > kMostIndexDim ||
      p.head_dim % 8 != 0 || p.num_best < 1 || p.num_best > kMostBest)
    return fail(MAGI_UNSUPPORTED,
                "%d heads of %d columns and the %d best keys: give 1 to %d heads, a multiple of 8 "
                "up to %d columns and at most %d keys.",
                p.heads, p.head_dim, p.num_best, kMostHeads, kMostIndexDim, kMostBest);
  if (p.block_size < 0 || p.local_blocks < 0 || p.local_blocks > p.num_best)
    return fail(MAGI_INVALID_ARGUMENT, "blocks of %d keys, the last %d of the %d best ones.",
                p.block_size, p.local_blocks, p.num_best);
  if (p.block_size == 0 && p.weights == nullptr)
    return fail(MAGI_INVALID_ARGUMENT, "lists of keys are for all heads, which need weights.");
  if (p.total_q < 0 || p.total_k < 0 || p.total_k > (1 << 30) || p.chunk < 1)
    return fail(MAGI_INVALID_ARGUMENT, "%d queries, %d at a time, and %d keys.", p.total_q, p.chunk,
                p.total_k);
  return MAGI_OK;
}

template <typename T, int kD, int kHeads, IndexerForm kForm>
magi_status run_indexer(const magi_ffa_indexer_params& a) {
  using C = IndexerConfig<T, kD, kHeads, kForm>;
  constexpr bool kHasBlocks = kForm != IndexerForm::kKeys;
  const CUtensorMapDataType type =
      a.dtype == MAGI_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const uint64_t d = a.head_dim, heads = a.heads, tq = a.total_q, tk = a.total_k;
  IndexerParams p{};
  if (a.total_k > 0) {
    MAGI_RETURN(encode_map(&p.q_map, type, a.q, {d, heads, tq},
                           {2 * a.q_stride_head, 2 * a.q_stride_token}, {64, kHeads, C::kQueries},
                           "q_index"));
    MAGI_RETURN(encode_map(&p.k_map, type, a.k, {d, tk, 1},
                           {2 * a.k_stride_token, 2 * a.k_stride_token * (int64_t)a.total_k},
                           {64, C::kTileKeys, 1}, "k_index"));
  }
  p.weights = a.weights;
  p.k_start = a.k_start;
  p.k_end = a.k_end;
  p.lists = a.lists;
  const int most_of_block = a.total_k > 0 ? a.total_k : 1;
  p.block_size = a.block_size < most_of_block ? a.block_size : most_of_block;
  p.local_blocks = a.local_blocks;
  if (kHasBlocks)
    p.ranks = static_cast<uint32_t*>(a.scratch);
  else
    p.scores = static_cast<float*>(a.scratch);
  const int64_t places = kHasBlocks ? (a.total_k - 1) / p.block_size + 1 : a.total_k;
  constexpr int64_t kStep = kHasBlocks ? 4 : kIndexerTileKeys;
  p.pitch = (places + kStep - 1) / kStep * kStep;
  p.total_k = a.total_k;
  p.heads = a.heads;
  p.num_lists = kForm == IndexerForm::kBlocksOfHeads ? a.heads : 1;
  p.num_best = a.num_best;
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(indexer_scores<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(C::kSmemBytes));
  }));
  const int64_t most = a.chunk < a.total_q ? a.chunk : a.total_q;
  const int64_t most_items = (most + C::kQueries) / C::kQueries * indexer_spans(a.total_k);
  if (most_items >= (1ll << 31) - (1 << 16))
    return fail(MAGI_UNSUPPORTED, "%d queries at a time and %d keys are too many; give fewer.",
                a.chunk, a.total_k);
  int sms = 0;
  MAGI_RETURN(multiprocessors(&sms));
  for (p.first_query = 0; p.first_query < a.total_q; p.first_query += a.chunk) {
    const int left = a.total_q - p.first_query;
    p.num_queries = left < a.chunk ? left : a.chunk;
    const int64_t tiles = (p.num_queries + C::kQueries - 1) / C::kQueries;
    const int64_t items = tiles * indexer_spans(a.total_k);
    const int64_t num_lists = static_cast<int64_t>(p.num_queries) * p.num_lists;
    if (kHasBlocks)
      MAGI_RETURN(cuda_status(
          cudaMemsetAsync(p.ranks, 0, 4 * num_lists * p.pitch, static_cast<cudaStream_t>(a.stream)),
          "clearing the scores of blocks"));
    if (a.total_k > 0)
      MAGI_RETURN(launch_kernel(indexer_scores<C>, dim3(items < sms ? items : sms), C::kThreads,
                                C::kSmemBytes, a.stream, p, "launching the scores of the indexer"));
    MAGI_RETURN(launch_kernel(kHasBlocks ? indexer_best_blocks : indexer_best, dim3(num_lists),
                              kPrepareThreads, kBestBytes, a.stream, p,
                              "launching the choice of the best keys"));
  }
  return MAGI_OK;
}

template <typename T, int kD>
magi_status choose_heads(const magi_ffa_indexer_params& a) {
  constexpr IndexerForm kKeys = IndexerForm::kKeys, kBlocks = IndexerForm::kBlocks;
  constexpr IndexerForm kBlocksOfHeads = IndexerForm::kBlocksOfHeads;
  if (a.weights == nullptr)
    return a.heads <= 8 ? run_indexer<T, kD, 8, kBlocksOfHeads>(a)
                        : run_indexer<T, kD, 64, kBlocksOfHeads>(a);
  if (a.block_size > 0)
    return a.heads <= 32 ? run_indexer<T, kD, 32, kBlocks>(a) : run_indexer<T, kD, 64, kBlocks>(a);
  return a.heads <= 32 ? run_indexer<T, kD, 32, kKeys>(a) : run_indexer<T, kD, 64, kKeys>(a);
}

template <typename T>
magi_status choose_indexer(const magi_ffa_indexer_params& a) {
  return a.head_dim <= 64 ? choose_heads<T, 64>(a) : choose_heads<T, 128>(a);
}

}  // namespace
}  // namespace magi

extern "C" {

magi_status magi_ffa_indexer_topk(const magi_ffa_indexer_params* params) {
  using namespace magi;
  MAGI_RETURN(check_indexer(*params));
  return params->dtype == MAGI_BF16 ? choose_indexer<bf16>(*params) : choose_indexer<fp16>(*params);
}
}
