// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/comm/symm, compiled for the CPU: a thread for each of a CTA's, CTAs one after
// another. test_symm_on_cpu.py makes the folder `symm` that is included here out of the kernels,
// without their launchers and with calls in place of PTX. Bulk stores happen as late as a kernel
// allows: when it waits for them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#include "../kernels/emulator/cuda_bf16.h"
#include "../kernels/emulator/cuda_fp16.h"

#define __shared__ static

namespace cpu {
struct Index {
  unsigned x;
};

// Meets so many threads.
class RankBarrier {
 public:
  explicit RankBarrier(unsigned count) { pthread_barrier_init(&barrier_, nullptr, count); }
  ~RankBarrier() { pthread_barrier_destroy(&barrier_); }
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

struct Warp {
  RankBarrier barrier{32};
  int votes[32];
};

struct Cta {
  explicit Cta(unsigned threads) : barrier(threads) {
    for (unsigned i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
  }
  RankBarrier barrier;
  std::vector<std::unique_ptr<Warp>> warps;
};

struct Barrier {
  int64_t bytes = 0;
  int count = 0, pending = 0, phase = 0;
  void settle() {
    if (pending == 0 && bytes == 0) ++phase, pending = count;
  }
};

inline thread_local Index thread, block;
inline Index grid, threads;
inline thread_local Cta* cta;
inline uint8_t* shared;  // where addresses of shared memory count from
inline std::mutex mutex;
inline std::condition_variable changed;
inline std::map<uint32_t, Barrier> barriers;

template <typename F>
void with_barrier(uint32_t at, F change) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    change(barriers[at]);
    barriers[at].settle();
  }
  changed.notify_all();
}

inline thread_local std::vector<std::vector<std::function<void()>>>
    groups;  // of stores that are committed, and at the end those that are not

template <typename P>
void launch(void (*kernel)(P), const P& params, int ctas, int threads_each, uint8_t* memory) {
  shared = memory;
  grid.x = ctas;
  threads.x = threads_each;
  for (int i = 0; i < ctas; ++i) {
    Cta mine(threads_each);
    barriers.clear();
    std::vector<std::thread> all;
    for (int t = 0; t < threads_each; ++t)
      all.emplace_back([&, t] {
        thread.x = t, block.x = i, cta = &mine;
        groups.assign(1, {});
        kernel(params);
      });
    for (auto& one : all) one.join();
  }
}
}  // namespace cpu

#define threadIdx cpu::thread
#define blockIdx cpu::block
#define gridDim cpu::grid
#define blockDim cpu::threads

inline void __syncthreads() { cpu::cta->barrier.wait(); }
inline int vote(int mine, const std::function<int(const int*)>& fold) {
  cpu::Warp& warp = *cpu::cta->warps[cpu::thread.x / 32];
  warp.votes[cpu::thread.x % 32] = mine;
  warp.barrier.wait();
  const int all = fold(warp.votes);
  warp.barrier.wait();
  return all;
}
inline bool __any_sync(unsigned, bool mine) {
  return vote(mine, [](const int* votes) {
    return static_cast<int>(std::any_of(votes, votes + 32, [](int x) { return x != 0; }));
  });
}
inline void __syncwarp() {
  vote(0, [](const int*) { return 0; });
}
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline uint32_t atomicAdd(uint32_t* at, uint32_t more) {
  return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST);
}

namespace magi {
// barrier.cuh and copy.cuh
inline uint32_t smem_addr(const void* at) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(at) - cpu::shared);
}
inline void mbar_init(uint32_t at, uint32_t arrivals) {
  std::lock_guard<std::mutex> lock(cpu::mutex);
  cpu::barriers[at] = {0, static_cast<int>(arrivals), static_cast<int>(arrivals), 0};
}
inline void mbar_init_fence() {}
inline void mbar_arrive(uint32_t at) {
  cpu::with_barrier(at, [](cpu::Barrier& x) { --x.pending; });
}
inline void mbar_expect(uint32_t at, uint32_t bytes) {
  cpu::with_barrier(at, [&](cpu::Barrier& x) { x.bytes += bytes, --x.pending; });
}
inline void mbar_wait(uint32_t at, uint32_t parity) {
  std::unique_lock<std::mutex> lock(cpu::mutex);
  cpu::changed.wait(lock,
                    [&] { return static_cast<uint32_t>(cpu::barriers[at].phase & 1) != parity; });
}
inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t at) {
  std::memcpy(cpu::shared + to, from, bytes);
  cpu::with_barrier(at, [&](cpu::Barrier& x) { x.bytes -= bytes; });
}
inline void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  cpu::groups.back().push_back([=] { std::memcpy(to, cpu::shared + from, bytes); });
}
inline void store_commit() { cpu::groups.emplace_back(); }
inline void bulk_wait(size_t but) {
  auto& groups = cpu::groups;
  for (; groups.size() > but + 1; groups.erase(groups.begin()))
    for (const auto& store : groups.front()) store();
}
inline void store_wait_all() { bulk_wait(0); }
inline void store_wait_read_but_one() { bulk_wait(1); }
inline void fence_async_proxy() {}
inline void fence_proxies() {}
inline void start_next_kernel() {}

// comm/symm/signal.cuh
inline uint32_t load_acquire_system(const uint32_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint32_t* at, uint32_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline uint32_t milliseconds() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
}  // namespace magi

#include "comm/symm/put.cu"
#include "comm/symm/unpack.cu"
#include "comm/symm/recv_reduce.cu"
#include "comm/symm/reduce.cu"
#include "comm/symm/barrier.cuh"

namespace magi {
inline namespace putting {
alignas(1024) uint8_t raw[kPutSmem];
}
inline namespace unpacking {
alignas(1024) uint8_t raw[kUnpackSmem];
}
inline namespace recv_reducing {
uint32_t arrived[1024];
}
}  // namespace magi

extern "C" {
int64_t control_bytes(int32_t world) {
  return (MAGI_SYMM_NEXT_TRANSFER(world) + 1) * static_cast<int64_t>(MAGI_SYMM_WORD_BYTES);
}
void put(const magi_symm_put_params* p) {
  cpu::launch(magi::symm_put, *p, p->num_ctas, magi::kMoveThreads, magi::putting::raw);
}
void unpack(const magi_symm_unpack_params* p) {
  cpu::launch(magi::symm_unpack, *p, p->num_ctas, magi::kMoveThreads, magi::unpacking::raw);
}
void recv_reduce(const magi_symm_recv_reduce_params* p) {
  cpu::launch(magi::symm_recv_reduce, *p, p->num_ctas, magi::kRecvReduceThreads, nullptr);
}
// As the forward of attention does it.
void release(const magi_symm_buffer* buffer, int rank, int world, uint32_t timeout_ms,
             int32_t* failed_peer) {
  magi::release_put_buffer_alone(*buffer, rank, world, timeout_ms, failed_peer);
}

// Runs all ranks, which wait for each other, by a thread of each.
void rank_barrier(const magi_symm_reduce_params* all, const int32_t* const* senders, int world) {
  cpu::threads.x = 1;
  std::vector<std::thread> ranks;
  for (int i = 0; i < world; ++i)
    ranks.emplace_back([=] {
      cpu::thread.x = 0;
      const magi_symm_reduce_params& p = all[i];
      magi::rank_barrier({p.buffer, senders[i], p.failed_peer, p.rank, p.world, p.timeout_ms});
    });
  for (auto& one : ranks) one.join();
}
void reduce(const magi_symm_reduce_params* p, int ctas) {
  cpu::launch(magi::symm_reduce, *p, ctas, magi::kReduceThreads, nullptr);
}
}
