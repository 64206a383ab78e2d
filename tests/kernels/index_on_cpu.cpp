// SPDX-License-Identifier: Apache-2.0
// The kernels of index attention for the CPU, see hopper_on_cpu/README.md: with the launchers' own
// parameters, on a grid and with a seed that the caller chooses.
#include "ffa/common/host.cu"
#include "ffa/sm90/index/bwd/delta.cuh"
#include "ffa/sm90/index/bwd/launch.cuh"
#include "ffa/sm90/index/bwd/sum_shares.cuh"
#include "ffa/sm90/index/fwd/launch.cuh"

namespace magi {
namespace {

template <typename Params>
int groups_of(const Params& a) {
  WorkTiles w;
  return work_tiles(a.total_q, a.heads_q, a.heads_kv, a.q_block, &w) == MAGI_OK ? w.groups : 0;
}

template <typename T, int kD, int kGroups>
const char* forward(const magi_ffa_index_fwd_params& a, int grid, int seed) {
  using C = IndexFwdConfig<T, kD, kGroups>;
  IndexFwdParams k;
  if (index_fwd_params(a, &k) != MAGI_OK) return error_buffer();
  if (k.work.groups != kGroups) return "The tile belongs to the other kernel.";
  return hopper::error_of(
      [&] { hopper::run_grid(grid, C::kThreads, C::kSmemBytes, index_fwd<C>, k, seed); });
}

template <typename T, int kD, int kRows>
const char* backward(const magi_ffa_index_bwd_params& a, int grid, int seed) {
  using C = IndexBwdConfig<T, kD, kRows>;
  IndexBwdParams k;
  if (index_bwd_params(a, &k) != MAGI_OK) return error_buffer();
  if (64 * k.work.groups != kRows) return "The tile belongs to the other kernel.";
  return hopper::error_of(
      [&] { hopper::run_grid(grid, C::kThreads, C::kSmemBytes, index_bwd<C>, k, seed); });
}

}  // namespace
}  // namespace magi

extern "C" {

const char* index_forward(const magi_ffa_index_fwd_params* a, int grid, int seed) {
  using namespace magi;
  const bool small = groups_of(*a) == 1;
  if (a->dtype == MAGI_FP16)
    return small ? forward<fp16, 64, 1>(*a, grid, seed) : forward<fp16, 64, 2>(*a, grid, seed);
  return small ? forward<bf16, 128, 1>(*a, grid, seed) : forward<bf16, 128, 2>(*a, grid, seed);
}

const char* index_backward(const magi_ffa_index_bwd_params* a, int grid, int seed) {
  using namespace magi;
  const bool small = groups_of(*a) == 1;
  if (a->dtype == MAGI_FP16)
    return small ? backward<fp16, 64, 64>(*a, grid, seed) : backward<fp16, 64, 128>(*a, grid, seed);
  return small ? backward<bf16, 128, 64>(*a, grid, seed) : backward<bf16, 128, 128>(*a, grid, seed);
}

const char* index_delta(const magi_ffa_index_bwd_params* a) {
  using namespace magi;
  const IndexDeltaParams k = index_delta_params(*a);
  const int grid = (k.num_rows + kDeltaThreads / 32 - 1) / (kDeltaThreads / 32);
  return hopper::error_of([&] {
    if (a->dtype == MAGI_FP16)
      hopper::run_grid(grid, kDeltaThreads, 0, index_delta_rows<fp16>, k, 0);
    else
      hopper::run_grid(grid, kDeltaThreads, 0, index_delta_rows<bf16>, k, 0);
  });
}

int index_tiles(int heads_q, int heads_kv, int q_block) {
  magi::WorkTiles w;
  return magi::work_tiles(q_block, heads_q, heads_kv, q_block, &w) == MAGI_OK ? w.tiles_of_list : 0;
}

const char* index_sum(const magi_ffa_index_sum_params* a) {
  using namespace magi;
  const int grid = (a->num_rows + kSumThreads / 32 - 1) / (kSumThreads / 32);
  return hopper::error_of([&] { hopper::run_grid(grid, kSumThreads, 0, index_sum_shares, *a, 0); });
}
}
