// SPDX-License-Identifier: Apache-2.0
// What semaphore targets rest on, compiled for the CPU: the warp that simulates the schedule
// (bwd/schedule/simulate.cuh), as 32 threads that meet wherever its lanes do, and the order in
// which work tiles traverse their blocks (bwd/schedule/plan_reader.cuh). And what the last kernel
// takes up (bwd/rows/postprocess_items.cuh).
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include <pthread.h>

#define __device__
#define __forceinline__ inline

using std::max;
using std::min;
struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
int __shfl_sync(unsigned, int, int);

namespace {
thread_local struct {
  int x;
} threadIdx;
pthread_barrier_t meeting;
unsigned votes[32];

// What all lanes vote, seen by all.
template <typename Fold>
unsigned fold(unsigned mine, unsigned start, Fold with) {
  votes[threadIdx.x] = mine;
  pthread_barrier_wait(&meeting);
  const unsigned all = std::accumulate(votes, votes + 32, start, with);
  pthread_barrier_wait(&meeting);
  return all;
}
unsigned __reduce_min_sync(unsigned, unsigned mine) {
  return fold(mine, ~0u, [](unsigned a, unsigned b) { return std::min(a, b); });
}
unsigned __ballot_sync(unsigned, bool mine) {
  return fold(mine ? 1u << threadIdx.x : 0u, 0u, [](unsigned a, unsigned b) { return a | b; });
}
int __popc(unsigned word) { return __builtin_popcount(word); }
}  // namespace

#include "ffa/sm90/bwd/rows/postprocess_items.cuh"
#include "ffa/sm90/bwd/schedule/simulate.cuh"

extern "C" void starts_of(const int32_t* sizes, const int32_t* costs, int32_t* starts) {
  const int ticks = magi::kTicks / sizes[4];  // of a block of a part
  const magi::ScheduleModel h{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],     ticks,
                              sizes[5], sizes[6], sizes[7], sizes[8], sizes[9] != 0};
  pthread_barrier_init(&meeting, nullptr, 32);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([=] {
      threadIdx.x = lane;
      magi::expect_starts(h, costs, starts);
    });
  for (auto& lane : lanes) lane.join();
  pthread_barrier_destroy(&meeting);
}

// Blocks `first` to `end` in the order of the traversal, and the place that each is said to have in
// it.
extern "C" int traverse(int first, int end, int traversal, int shift, int32_t* blocks,
                        int32_t* places) {
  const int2 range{first, end};
  const auto how = static_cast<magi::Traversal>(traversal);
  const auto again = [&] { return range; };
  int count = 0;
  for (magi::MBlockIter order(range, how, shift); order.left() > 0;
       order.step(again, [&] { return how == magi::Traversal::kDescending; })) {
    if (count == end - first) return -1;
    blocks[count] = order.block;
    places[count++] = magi::place_in_traversal(range, how, shift, order.block);
  }
  return count;
}

// What items depend on in BwdRowParams.
struct ItemSizes {
  int32_t heads_q, heads_kv, heads_per_l2_group, dim_blocks;
};

// Block, head and 64 columns of each of so many items.
extern "C" void items_of(const int32_t* sizes, int count, int32_t* items) {
  const ItemSizes p{sizes[1], sizes[2], sizes[3], sizes[4]};
  for (int number = 0; number < count; ++number) {
    const magi::PostprocessItem x = magi::postprocess_item(p, sizes[0], number);
    const int32_t words[] = {x.order_idx, x.head, x.d};
    std::copy(words, words + 3, items + 3 * number);
  }
}
