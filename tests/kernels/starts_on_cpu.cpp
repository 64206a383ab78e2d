// SPDX-License-Identifier: Apache-2.0
// The warp that simulates how units are handed out (bwd_starts.cuh), as 32 threads that meet wherever its lanes do.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include <pthread.h>

#define __device__
#define __forceinline__ inline

namespace {
thread_local struct {
  int x;
} threadIdx;
pthread_barrier_t meeting;
unsigned told[32];

// What all lanes tell, seen by all.
template <typename Fold>
unsigned fold(unsigned mine, unsigned start, Fold with) {
  told[threadIdx.x] = mine;
  pthread_barrier_wait(&meeting);
  const unsigned all = std::accumulate(told, told + 32, start, with);
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

#include "ffa/sm90/bwd_starts.cuh"

extern "C" void starts_of(const int32_t* sizes, const int32_t* costs, int32_t* starts) {
  const magi::HandOut h{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6] != 0};
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
