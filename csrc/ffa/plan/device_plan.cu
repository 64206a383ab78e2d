// SPDX-License-Identifier: Apache-2.0
// Device producer of the tile plan: one warp per tile finds its slices and builds its segments,
// then a second kernel orders the tiles, marks segments that may touch unseen keys and completes
// the header. No host synchronisation, no memory besides the plan.
//
// Tiles take room for their records from a counter, so where the records lie differs from run to
// run; what they hold does not, and equals what the host producer makes. Slices with a range
// outside [0, total), with end < start or of an unknown type are left out.

#include "ffa/plan/finish.cuh"
#include "ffa/plan/tiles.cuh"

namespace magi {
namespace tile {
inline namespace planner {

constexpr int32_t kFlagBlocks = 32;  // CTAs that mark segments

int32_t finish_shared_bytes(const PlanParams& p) {
  const int32_t order_words = p.num_tiles <= kRankedTiles ? p.num_tiles : kDigits * kFinishThreads;
  return (4 * max_of(order_words, 2 * p.max_ranges) + 15) / 16 *
         16;  // the compiler reads four words at a time
}

magi_status launch_plan(const PlanParams& p, cudaStream_t stream) {
  MAGI_RETURN(cuda_status(cudaMemsetAsync(p.plan, 0, sizeof(magi_tile_plan_header), stream),
                          "clearing the header of the tile plan"));
  if (p.num_tiles > 0) {
    const uint32_t ctas = (static_cast<uint32_t>(p.num_tiles) + kPlanWarps - 1) / kPlanWarps;
    plan_tiles<<<ctas, 32 * kPlanWarps, 0, stream>>>(p);
    MAGI_RETURN(cuda_status(cudaGetLastError(), "launching the tile planner"));
  }
  static DeviceOnce configured;
  MAGI_RETURN(configured.run([] {
    return cudaFuncSetAttribute(finish_plan, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                8 * kMaxRanges);
  }));
  const int32_t mark_ctas = max_of(1, min_of(kFlagBlocks, (p.num_tiles - 1) / kFinishWarps + 1));
  finish_plan<<<1 + mark_ctas, kFinishThreads, finish_shared_bytes(p), stream>>>(p);
  return cuda_status(cudaGetLastError(), "launching the end of the tile planner");
}

magi_status check_arguments(const PlanParams& p, int64_t plan_words, int64_t fixed_words) {
  if (p.total_q < 0 || p.total_k < 0 || p.num_slices < 0)
    return fail(MAGI_INVALID_ARGUMENT,
                "total_q is %d, total_k %d and num_slices %d; none may be negative.", p.total_q,
                p.total_k, p.num_slices);
  if (p.shape.tile_tokens < 1 || p.shape.tile_tokens > kMaxTileTokens || p.shape.num_groups < 1 ||
      p.shape.num_groups > kMaxGroups)
    return fail(MAGI_INVALID_ARGUMENT,
                "tile_tokens is %d and num_groups %d; they must be 1 to %d and 1 to %d.",
                p.shape.tile_tokens, p.shape.num_groups, kMaxTileTokens, kMaxGroups);
  if (p.num_slices > 0 && (p.q_ranges == nullptr || p.k_ranges == nullptr))
    return fail(MAGI_INVALID_ARGUMENT, "q_ranges or k_ranges is NULL; give %d pairs in each.",
                p.num_slices);
  if (reinterpret_cast<uintptr_t>(p.q_ranges) % 8 || reinterpret_cast<uintptr_t>(p.k_ranges) % 8)
    return fail(MAGI_INVALID_ARGUMENT, "q_ranges and k_ranges must lie at multiples of 8 bytes.");
  if (p.plan == nullptr || reinterpret_cast<uintptr_t>(p.plan) % 16)
    return fail(MAGI_INVALID_ARGUMENT, "plan must be device memory at a multiple of 16 bytes.");
  if (plan_words < fixed_words || fixed_words > kInt32Max)
    return fail(
        MAGI_CAPACITY,
        "The buffer has %lld words; the plan needs %lld without any segment, 2^31 - 1 at most.",
        static_cast<long long>(plan_words), static_cast<long long>(fixed_words));
  return MAGI_OK;
}

}  // namespace planner
}  // namespace tile
}  // namespace magi

extern "C" magi_status magi_tile_plan_device(const int32_t* q_ranges, const int32_t* k_ranges,
                                             const int32_t* types, int32_t num_slices,
                                             int32_t total_q, int32_t total_k, int32_t tile_tokens,
                                             int32_t num_groups, int32_t* plan, int64_t plan_words,
                                             void* stream) {
  using namespace magi::tile;
  PlanParams p{reinterpret_cast<const int2*>(q_ranges),
               reinterpret_cast<const int2*>(k_ranges),
               types,
               num_slices,
               total_q,
               total_k,
               0,
               Shape{tile_tokens, num_groups},
               plan};
  const int64_t num_tiles =
      tile_tokens > 0 ? (static_cast<int64_t>(total_q) + tile_tokens - 1) / tile_tokens : 0;
  MAGI_RETURN(check_arguments(p, plan_words, records_at(num_tiles)));
  set_layout(p, static_cast<int32_t>(num_tiles), plan_words);
  return launch_plan(p, static_cast<cudaStream_t>(stream));
}
