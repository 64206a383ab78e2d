// SPDX-License-Identifier: Apache-2.0
// The transposed mask from range tensors on the device.
#include "ffa/plan/params.cuh"

namespace magi {
namespace tile {
inline namespace planner {

constexpr int32_t kTransposeThreads = 128;

struct TransposeParams {
  PlanParams mask;  // its slices and totals
  int2 *rows, *columns;
  int32_t* types;
};

__global__ void __launch_bounds__(kTransposeThreads) transpose_slices(const TransposeParams p) {
  const int32_t i =
      static_cast<int32_t>(blockIdx.x) * kTransposeThreads + static_cast<int32_t>(threadIdx.x);
  if (i >= p.mask.num_slices) return;
  Slice s, out[3] = {};
  if (load_slice(p.mask, i, p.mask.q_ranges[i], s)) transpose_slice(s, out);
#pragma unroll
  for (int32_t j = 0; j < 3; ++j) {
    const int64_t at = 3 * static_cast<int64_t>(i) + j;
    p.rows[at] = make_int2(out[j].q0, out[j].q1);
    p.columns[at] = make_int2(out[j].k0, out[j].k1);
    p.types[at] = out[j].type;
  }
}

}  // namespace planner
}  // namespace tile
}  // namespace magi

extern "C" magi_status magi_tile_transpose_device(const int32_t* q_ranges, const int32_t* k_ranges,
                                                  const int32_t* types, int32_t num_slices,
                                                  int32_t total_q, int32_t total_k,
                                                  int32_t* row_ranges, int32_t* column_ranges,
                                                  int32_t* new_types, void* stream) {
  using namespace magi::tile;
  if (num_slices < 0 || num_slices > kInt32Max / 3 || total_q < 0 || total_k < 0)
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "num_slices is %d, total_q %d and total_k %d; three times the slices must fit "
        "31 bits, and none may be negative.",
        num_slices, total_q, total_k);
  if (num_slices == 0) return MAGI_OK;
  for (const void* x :
       {static_cast<const void*>(q_ranges), static_cast<const void*>(k_ranges),
        static_cast<const void*>(row_ranges), static_cast<const void*>(column_ranges)})
    if (x == nullptr || reinterpret_cast<uintptr_t>(x) % 8)
      return magi::fail(MAGI_INVALID_ARGUMENT,
                        "Ranges must be device memory at multiples of 8 bytes.");
  if (new_types == nullptr)
    return magi::fail(MAGI_INVALID_ARGUMENT, "new_types is NULL; give %d words.", 3 * num_slices);
  TransposeParams p{};
  p.mask.q_ranges = reinterpret_cast<const int2*>(q_ranges);
  p.mask.k_ranges = reinterpret_cast<const int2*>(k_ranges);
  p.mask.types = types;
  p.mask.num_slices = num_slices;
  p.mask.total_q = total_q;
  p.mask.total_k = total_k;
  p.rows = reinterpret_cast<int2*>(row_ranges);
  p.columns = reinterpret_cast<int2*>(column_ranges);
  p.types = new_types;
  transpose_slices<<<(num_slices - 1) / kTransposeThreads + 1, kTransposeThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the transposition of the mask");
}
