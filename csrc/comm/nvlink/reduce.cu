// SPDX-License-Identifier: Apache-2.0
// Sum of rows that other ranks wrote into this rank's box, in the order of the ranks, see magi/box.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../ffa/common/host.h"
#include "box.cuh"
#include "box_launch.h"
#include "meet.cuh"

namespace magi {
inline namespace box_summing {  // named, because nvcc puts the path of the file into the names of what has no name

constexpr int kReduceThreads = 256;

__device__ __forceinline__ void unpack(uint32_t word, int dtype, float* to) {
  if (dtype == MAGI_BF16) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    to[0] = pair.x;
    to[1] = pair.y;
  }
}

// Eight values from `at`, counted in values.
__device__ __forceinline__ void load_eight(const void* from, int64_t at, int dtype, float (&x)[8]) {
  if (dtype == MAGI_FP32) {
    const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 a = __ldcs(source), b = __ldcs(source + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at));
  unpack(words.x, dtype, x);
  unpack(words.y, dtype, x + 2);
  unpack(words.z, dtype, x + 4);
  unpack(words.w, dtype, x + 6);
}

__device__ __forceinline__ uint32_t pack(float a, float b, int dtype) {
  if (dtype == MAGI_BF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_eight(void* to, int64_t at, int dtype, const float (&x)[8]) {
  if (dtype == MAGI_FP32) {
    float4* target = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
    target[0] = make_float4(x[0], x[1], x[2], x[3]);
    target[1] = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + at) =
      make_uint4(pack(x[0], x[1], dtype), pack(x[2], x[3], dtype), pack(x[4], x[5], dtype), pack(x[6], x[7], dtype));
}

__device__ __forceinline__ void sum_row(const magi_box_reduce_params& p, int t, int row, int column) {
  const int64_t at = static_cast<int64_t>(row) * p.row_values[t] + column;
  const char* data = static_cast<const char*>(p.box.own) + p.data_at[t];
  float sum[8] = {}, x[8];
  if (p.base[t] != nullptr) load_eight(p.base[t], at, p.base_dtype, sum);
  for (int peer = 0; peer < p.world; ++peer) {
    const int place = __ldg(p.places + static_cast<int64_t>(peer) * p.rows + row);
    if (place < 0) continue;
    load_eight(data, static_cast<int64_t>(place) * p.row_values[t] + column, p.wire_dtype, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
  }
  store_eight(p.out[t], at, p.out_dtype, sum);
}

__global__ void __launch_bounds__(kReduceThreads) box_reduce(const __grid_constant__ magi_box_reduce_params p) {
  for (int t = 0; t < p.num_tensors; ++t) {
    const int per_row = p.row_values[t] / 8;
    const int64_t total = static_cast<int64_t>(p.rows) * per_row, step = static_cast<int64_t>(gridDim.x) * kReduceThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x; i < total; i += step) {
      const int row = static_cast<int>(i / per_row);
      sum_row(p, t, row, static_cast<int>(i - static_cast<int64_t>(row) * per_row) * 8);
    }
  }
  // The last CTA ends the uses.
  if (!is_last_cta(box_word(p.box.own, MAGI_BOX_CTAS))) return;
  __threadfence_system();
  release_box(p.box, p.rank, p.world);
  if (p.pushed.own != nullptr) release_pushed_box(p.pushed, p.rank, p.world, p.timeout_ms, p.failure);
}

}  // namespace box_summing
}  // namespace magi

extern "C" magi_status magi_box_reduce(const magi_box_reduce_params* params) {
  const magi_box_reduce_params& p = *params;
  MAGI_RETURN(magi::check_world(p.version, p.rank, p.world, p.box));
  if (p.num_tensors < 1 || p.num_tensors > MAGI_BOX_TENSORS || p.rows < 0)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d tensors of %d rows; give 1 to %d tensors.", p.num_tensors, p.rows,
                      MAGI_BOX_TENSORS);
  int64_t most = 0;
  for (int t = 0; t < p.num_tensors; ++t) {
    if (p.row_values[t] < 8 || p.row_values[t] % 8 || p.data_at[t] % 16)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Rows of tensor %d have %d values; they must be multiples of 8.", t, p.row_values[t]);
    const int64_t work = static_cast<int64_t>(p.rows) * (p.row_values[t] / 8);
    most = work > most ? work : most;
  }
  int sms = 0;
  MAGI_RETURN(magi::multiprocessors(&sms));
  const int64_t wanted = (most + magi::kReduceThreads - 1) / magi::kReduceThreads, room = 8ll * sms;
  const int grid = static_cast<int>(wanted < 1 ? 1 : wanted < room ? wanted : room);
  magi::box_meet<<<1, magi::kMeetThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  MAGI_RETURN(magi::cuda_status(cudaGetLastError(), "launching the wait for rows"));
  magi::box_reduce<<<grid, magi::kReduceThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching the sum of rows");
}
