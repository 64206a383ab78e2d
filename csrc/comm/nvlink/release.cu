// SPDX-License-Identifier: Apache-2.0
// The end of a use of a box whose rows were read where they lie, see magi/box.h.

#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"

namespace magi {
inline namespace box_releasing {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kReleaseThreads = 128;

__global__ void __launch_bounds__(kReleaseThreads) box_release(const __grid_constant__ magi_box_release_params p) {
  release_pushed_box(p.box, p.rank, p.world, p.timeout_ms, p.failure);
}

}  // namespace box_releasing
}  // namespace magi

extern "C" magi_status magi_box_release(const magi_box_release_params* params) {
  MAGI_RETURN(magi::check_world(params->version, params->rank, params->world, params->box));
  magi::box_release<<<1, magi::kReleaseThreads, 0, static_cast<cudaStream_t>(params->stream)>>>(*params);
  MAGI_RETURN(magi::cuda_status(cudaGetLastError(), "launching the release of a box"));
  return magi::record_end(params->event, params->stream);
}
