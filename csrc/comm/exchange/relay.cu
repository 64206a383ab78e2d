// SPDX-License-Identifier: Apache-2.0
// Puts of a group cast over nodes beside an attention kernel that waits for what arrives, see
// magi/comm.h.

#include "comm/exchange/verbs.cuh"
#include "device/dependent_launch.cuh"

namespace magi {
namespace comm {

static_assert((MAGI_SYMM_NEXT_TRANSFER(1) + 1) * MAGI_SYMM_WORD_BYTES <= MAGI_COMM_CONTROL_BYTES,
              "control words of a buffer of one rank");

// By a CTA: zeros to a multiple of 16 bytes.
__device__ __forceinline__ void clear_bytes(char* at, int64_t bytes) {
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(at)[i] = make_uint4(0, 0, 0, 0);
}

// By a CTA: a group after the other, as its signals have counted this epoch.
__device__ __forceinline__ void pass_on(const Network& network, const magi_comm_relay_params& p,
                                        char* control, uint32_t epoch) {
  const magi_comm_epoch& e = p.put.epoch;
  for (int t = 0; t < 2; ++t) clear_bytes(place(e, p.clear_at[t]), p.clear_bytes[t]);
#pragma unroll 1
  for (int group = 0; group < p.num_groups; ++group) {
    const int64_t begin = p.begins[group];
    const int64_t* waits = p.waits + begin * MAGI_COMM_WAIT_WORDS;
    if (!wait_for_all<false>(network, e, waits, p.begins[group + 1] - begin)) return;
    if (threadIdx.x == 0)
      store_release_system(symm_word(control, MAGI_SYMM_SIGNAL(1, group)), epoch);
  }
}

// The last CTA passes on what arrives here, the others put. All of them have a multiprocessor when
// the next kernel starts, which may then take the others: so no rank waits for a put that waits for
// a multiprocessor.
__global__ void __launch_bounds__(kCommPutThreads)
    comm_relay(const __grid_constant__ magi_comm_relay_params p) {
  start_next_kernel();
  const Network network(p.put.epoch);
  char* control = place(p.put.epoch, p.control_at);
  const uint32_t epoch = *symm_word(control, MAGI_SYMM_EPOCH) + 1;
  if (static_cast<int>(blockIdx.x) < p.put.num_ctas)
    put_all(network, p.put);
  else
    pass_on(network, p, control, epoch);
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t* ctas = symm_word(control, MAGI_SYMM_UNPACK_CTAS(1));
  __threadfence();
  if (atomicAdd(ctas, 1) + 1 != gridDim.x) return;
  *ctas = 0;
  __threadfence();
  store_release_system(symm_word(control, MAGI_SYMM_PUT_DONE), epoch);
}

}  // namespace comm
}  // namespace magi

extern "C" magi_status magi_comm_relay(const magi_comm_relay_params* params) {
  const magi_comm_relay_params& p = *params;
  MAGI_RETURN(magi_comm_check(p.put.version));
  if (p.put.num_puts < 0 || p.put.num_credits < 0 || p.put.num_ctas < 1 || p.num_groups < 0 ||
      p.num_groups > MAGI_SYMM_SIGNALS_PER_RANK)
    return magi::fail(MAGI_INVALID_ARGUMENT, "%d puts after %d credits by %d CTAs, %d groups.",
                      p.put.num_puts, p.put.num_credits, p.put.num_ctas, p.num_groups);
  magi::comm::comm_relay<<<p.put.num_ctas + 1, magi::comm::kCommPutThreads, 0,
                           static_cast<cudaStream_t>(p.put.stream)>>>(p);
  return magi::cuda_status(cudaGetLastError(), "launching puts beside attention");
}
