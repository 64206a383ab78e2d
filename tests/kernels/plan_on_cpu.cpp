// SPDX-License-Identifier: Apache-2.0
// The kernels of the device tile planner for the CPU, see hopper_on_cpu/README.md.
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
                              int tile_tokens, int num_groups, int32_t* plan, int capacity,
                              int seed) {
  using namespace magi::tile;
  PlanParams p{};
  p.q_ranges = reinterpret_cast<const int2*>(q_ranges);
  p.k_ranges = reinterpret_cast<const int2*>(k_ranges);
  p.types = types;
  p.num_slices = num_slices;
  p.total_q = total_q;
  p.total_k = total_k;
  p.shape = Shape{tile_tokens, num_groups};
  p.num_tiles = (total_q + tile_tokens - 1) / tile_tokens;
  p.plan = plan;
  p.words_order = static_cast<int32_t>(order_at(p.num_tiles));
  p.words_records = static_cast<int32_t>(records_at(p.num_tiles));
  p.capacity = capacity;
  p.max_ranges = 2;
  while (p.max_ranges < num_slices) p.max_ranges *= 2;
  const int shared = 4 * max_of(p.num_tiles, 2 * p.max_ranges);
  return hopper::error_of([&] {
    const int ctas = (p.num_tiles + kPlanWarps - 1) / kPlanWarps;
    if (ctas > 0) hopper::run_grid(ctas, 32 * kPlanWarps, 0, plan_tiles, p, seed);
    hopper::run_grid(2, kFinishThreads, (shared + 15) / 16 * 16, finish_plan, p, seed);
  });
}
}
