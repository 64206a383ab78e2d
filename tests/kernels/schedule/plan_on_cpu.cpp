// SPDX-License-Identifier: Apache-2.0
// The kernels of the device tile planner for the CPU, see emulator/README.md.
#include "ffa/common/host.cu"
#include "ffa/plan/finish.cuh"
#include "ffa/plan/tiles.cuh"

// The dynamic shared memory of finish_plan.
namespace magi {
namespace tile {
inline namespace planner {
thread_local __align__(16) int32_t work[4096];
}
}  // namespace tile
}  // namespace magi

extern "C" {

const char* plan_tiles_on_cpu(const int32_t* q_ranges, const int32_t* k_ranges,
                              const int32_t* types, int num_slices, int total_q, int total_k,
                              int tile_tokens, int num_groups, int32_t* plan, int plan_words,
                              int seed) {
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
  set_layout(p, (total_q + tile_tokens - 1) / tile_tokens, plan_words);
  const int shared = 4 * max_of(p.num_tiles, 2 * p.max_ranges);
  return hopper::error_of([&] {
    const int ctas = (p.num_tiles + kPlanWarps - 1) / kPlanWarps;
    if (ctas > 0) hopper::run_grid(ctas, 32 * kPlanWarps, 0, plan_tiles, p, seed);
    hopper::run_grid(2, kFinishThreads, (shared + 15) / 16 * 16, finish_plan, p, seed);
  });
}
}
