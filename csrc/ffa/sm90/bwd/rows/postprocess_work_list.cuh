// SPDX-License-Identifier: Apache-2.0
// The last kernel of the backward with a work list: it rounds dq_accum, and combines dk and dv of
// split work tiles, each when it is complete (bwd/rows/completion.cuh).
#pragma once

#include <climits>

#include "ffa/sm90/bwd/rows/completion.cuh"
#include "ffa/sm90/bwd/rows/postprocess.cuh"
#include "ffa/sm90/bwd/rows/combine_partials.cuh"

namespace magi {

// For a multiprocessor; what a thread holds of 80 queries does not fit into a third of the
// registers.
constexpr int postprocess_work_list_ctas(int queries) { return queries == kBlockM64 ? 4 : 2; }

struct BwdPostprocessParams {
  BwdRowParams rows;
  BwdCombinePartialsParams combine;
  int32_t members;  // of an entry: query heads
};

// For a plan that did not fit.
template <typename T>
__device__ __forceinline__ void write_nan_dq(const BwdRowParams& p) {
  const int64_t count = static_cast<int64_t>(p.total_q) * p.heads_q * p.head_dim;
  for (int64_t i = blockIdx.x * kRowThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kRowThreads) {
    if (p.grads_are_float)
      static_cast<float*>(p.dq)[i] = __int_as_float(0x7fffffff);
    else
      static_cast<T*>(p.dq)[i] = T(__int_as_float(0x7fffffff));
  }
}

// CTAs take places until there are no more. A place is one query head of a block of dq; or for a
// split tile and kv head, one range of its rows, of which there are as many as query heads. An
// entry of the list has the places of one part of the query heads of a kv head. While a CTA works
// on a block it looks up whether the next place is complete, and which place follows.
template <typename T, int kBlockM>
__global__ void __launch_bounds__(kRowThreads, postprocess_work_list_ctas(kBlockM))
    bwd_postprocess_work_list(const __grid_constant__ BwdPostprocessParams p) {
  const BwdRowParams& rows = p.rows;
  if (!bwd_plan_fits(rows.plan, rows.total_q, rows.total_k)) {
    wait_for_kernel_before();
    write_nan_dq<T>(rows);
    return;
  }
  constexpr int kNone = INT_MIN;
  __shared__ int2 places[3];  // of this round and the next two: query head and block; row range and
                              // ~partial; or kNone
  const magi_work_list& list = work_list_header(rows.work_list);
  const int32_t* tiles_of_block = rows.work_list + list.words_tiles_of_block;
  auto look_up = [&](int2& to, int place) {
    const int at = place / p.members, member = place - at * p.members;
    if (at >= list.num_entries) {
      to = make_int2(0, kNone);
      return;
    }
    const int2 entry =  // magi_list_entry
        __ldg(reinterpret_cast<const int2*>(rows.work_list + list.words_entries) + at);
    to = make_int2(entry.y * p.members + member, entry.x);
  };
  // This thread's part of the answer.
  auto is_there = [&](int2 place) {
    if (place.y == kNone) return true;
    if (place.y >= 0)
      return is_block_complete(rows, tiles_of_block + place.y * list.tile_words,
                               place.x / p.members);
    if (threadIdx.x >= kListedHeadSplits) return true;
    const int4 partial = listed_partial(p.combine, ~place.y);
    return is_complete(rows, partial.x, partial.y * kListedHeadSplits + threadIdx.x);
  };
  if (threadIdx.x == 0) {
    // Rows of blocks that no tile adds to need not be prepared by now.
    while (load_acquire(rows.workspace + kPreparedWord) < rows.prepare_groups) {
    }
    look_up(places[0], atomicAdd(rows.workspace + kPlaceWord, 1));
    look_up(places[1], atomicAdd(rows.workspace + kPlaceWord, 1));
  }
  __syncthreads();
  bool mine = is_there(places[0]);
  for (int round = 0;; round = round == 2 ? 0 : round + 1) {
    while (!__syncthreads_and(mine)) {
      __nanosleep(200);
      mine = is_there(places[round]);
    }
    const int2 place = places[round];
    if (place.y == kNone) break;
    auto look_ahead = [&] {
      if (threadIdx.x == 0)
        look_up(places[round == 0 ? 2 : round - 1], atomicAdd(rows.workspace + kPlaceWord, 1));
      mine = is_there(places[round == 2 ? 0 : round + 1]);
    };
    if (place.y >= 0) {
      postprocess_block<T, kBlockM>(rows, place.y, place.x, rows.grad_scale, look_ahead);
    } else {
      look_ahead();
      combine_rows<T>(p.combine.combine.dk_parts, p.combine.combine.dk, p.combine.combine.dk_count,
                      p.combine.head_dim, p.combine, ~place.y, place.x,
                      kListedHeadSplits * p.members);
      combine_rows<T>(p.combine.combine.dv_parts, p.combine.combine.dv, p.combine.combine.dv_count,
                      p.combine.head_dim_v, p.combine, ~place.y, place.x,
                      kListedHeadSplits * p.members);
    }
  }
  // What comes after this kernel is behind the main one, too.
  if (blockIdx.x == 0) wait_for_kernel_before();
}

}  // namespace magi
