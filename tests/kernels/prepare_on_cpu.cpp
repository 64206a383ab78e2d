// SPDX-License-Identifier: Apache-2.0
// The kernels that make the lists of index attention for the CPU, see hopper_on_cpu/README.md.
#include "ffa/common/host.cu"
#include "ffa/sm90/index/prepare.cuh"

extern "C" {

const char* prepare_lists(magi_ffa_index_prepare_params* p, int seed) {
  using namespace magi;
  p->num_words = static_cast<int32_t>(prepare_words(*p));
  const int grid = p->num_lists * p->heads_kv;
  return hopper::error_of([&] {
    if (p->is_int64)
      hopper::run_grid(grid, kPrepareThreads, prepare_bytes(*p), index_prepare_lists<int64_t>, *p,
                       seed);
    else
      hopper::run_grid(grid, kPrepareThreads, prepare_bytes(*p), index_prepare_lists<int32_t>, *p,
                       seed);
  });
}

const char* lists_of_blocks(magi_ffa_index_prepare_params* p, int seed) {
  using namespace magi;
  const int grid = (p->num_lists * p->heads_kv + kPrepareWarps - 1) / kPrepareWarps;
  return hopper::error_of(
      [&] { hopper::run_grid(grid, kPrepareThreads, 0, index_lists_of_blocks, *p, seed); });
}
}
