// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/comm over a network of threads: every CTA is one thread, and every put a job
// that one of the network's threads picks at random. It reads its source when it is picked, so
// puts overtake one another. In half of the pairs of ranks, one rank reaches the memory of the
// other itself, so that its kernels store there. test_nvshmem_on_cpu.py makes the sources that are
// included here.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../kernels/emulator/cuda_bf16.h"
#include "../kernels/emulator/cuda_fp16.h"

#define __shared__ static

// Not `cpu`, as elsewhere: equal names of inline variables are one variable in a whole process.
namespace wired {
struct Index {
  unsigned x;
};
inline thread_local Index thread, block, grid, threads{1};

struct Job {
  char* target;
  const char* source;
  size_t bytes;
  uint64_t* signal;
  uint64_t add;
  std::atomic<int>* pending;
};

// All ranks of this process.
class Network {
 public:
  Network(int world, char** arenas, uint32_t seed, uint32_t slow_us)
      : seed_(seed), slow_us_(slow_us), arenas_(arenas, arenas + world) {
    pending_ = std::vector<std::atomic<int>>(world);
    for (int i = 0; i < 8; ++i) workers_.emplace_back([=, this] { work(seed + i); });
  }
  ~Network() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  void put(int rank, void* target, const void* source, size_t bytes, uint64_t* signal, uint64_t add,
           int peer) {
    ++pending_[rank];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back({at(rank, peer, target), static_cast<const char*>(source), bytes,
                       reinterpret_cast<uint64_t*>(at(rank, peer, signal)), add, &pending_[rank]});
    }
    changed_.notify_one();
  }
  // Null where loads and stores do not reach it.
  void* near(int rank, int peer, const void* mine) {
    std::seed_seq pair{seed_, static_cast<uint32_t>(rank), static_cast<uint32_t>(peer)};
    if (std::mt19937(pair)() % 2) return nullptr;
    if (look_++ % 16 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(look_ * 7919 % slow_us_));
    return at(rank, peer, const_cast<void*>(mine));
  }
  void drain(int rank) {
    while (pending_[rank] != 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  char* at(int rank, int peer, void* mine) {
    return arenas_[peer] + (static_cast<char*>(mine) - arenas_[rank]);
  }
  void work(uint32_t seed) {
    std::mt19937 random(seed);
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return is_over_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        std::swap(jobs_[random() % jobs_.size()], jobs_.back());
        job = jobs_.back();
        jobs_.pop_back();
      }
      if (random() % 16 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % slow_us_));
      std::memcpy(job.target, job.source, job.bytes);
      if (random() % 2) std::this_thread::yield();
      __atomic_fetch_add(job.signal, job.add, __ATOMIC_SEQ_CST);
      --*job.pending;
    }
  }
  uint32_t seed_, slow_us_;
  std::atomic<uint32_t> look_ = 0;
  std::vector<char*> arenas_;
  std::vector<std::atomic<int>> pending_;
  std::vector<std::thread> workers_;
  std::vector<Job> jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
};

inline std::map<int, std::unique_ptr<Network>> networks;
inline std::mutex mutex;
inline thread_local Network* network;
inline thread_local int rank;

// CTAs that come before `first` begin so much later.
template <typename P>
void launch(void (*kernel)(P), const P& params, int ctas, int world, int of_rank, int first = 0,
            int late_ms = 0) {
  Network* shared;
  {
    std::lock_guard<std::mutex> lock(mutex);
    shared = networks.at(world).get();
  }
  std::vector<std::thread> all;
  for (int i = 0; i < ctas; ++i)
    all.emplace_back([=, &params] {
      thread.x = 0, block.x = i, grid.x = ctas, network = shared, rank = of_rank;
      if (i < first) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
      kernel(params);
    });
  for (auto& one : all) one.join();
}
}  // namespace wired

#define threadIdx wired::thread
#define blockIdx wired::block
#define gridDim wired::grid
#define blockDim wired::threads

enum { NVSHMEM_SIGNAL_ADD = 1 };
inline void __syncthreads() {}
inline bool __syncthreads_and(bool is_fine) { return is_fine; }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// Every CTA of a launch is a new thread; one that has waited for long looks seldom.
inline thread_local int looks;
inline void __nanosleep(unsigned) {
  std::this_thread::sleep_for(std::chrono::microseconds(++looks < 200 ? 50 : 5000));
}
inline uint64_t nvshmem_signal_fetch(uint64_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void nvshmemx_putmem_signal_nbi_block(void* target, const void* source, size_t bytes,
                                             uint64_t* signal, uint64_t add, int, int peer) {
  wired::network->put(wired::rank, target, source, bytes, signal, add, peer);
}
inline void nvshmemx_signal_op(uint64_t* signal, uint64_t add, int, int peer) {
  wired::network->put(wired::rank, signal, signal, 0, signal, add, peer);
}
inline void* nvshmem_ptr(const void* mine, int peer) {
  return wired::network->near(wired::rank, peer, mine);
}
inline void nvshmem_quiet() { wired::network->drain(wired::rank); }

inline void __threadfence() { __threadfence_system(); }
inline unsigned atomicAdd(uint32_t* at, unsigned value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}

namespace magi {
inline uint32_t load_acquire_system(const uint32_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint32_t* at, uint32_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline void add_release_system(void* at, uint64_t value) {
  __atomic_fetch_add(static_cast<uint64_t*>(at), value, __ATOMIC_RELEASE);
}
inline uint32_t milliseconds() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
inline void start_next_kernel() {}
}  // namespace magi

#include "comm/exchange/put.cu"
#include "comm/exchange/relay.cu"
#include "comm/exchange/wait.cu"
#include "comm/exchange/sum.cu"
#include "comm/exchange/end.cu"

extern "C" {
void network(int id, int world, char** arenas, uint32_t seed, uint32_t slow_us) {
  std::lock_guard<std::mutex> lock(wired::mutex);
  wired::networks[id] = std::make_unique<wired::Network>(world, arenas, seed, slow_us);
}
void network_ends(int id) {
  std::lock_guard<std::mutex> lock(wired::mutex);
  wired::networks.erase(id);
}
void put(const magi_comm_put_params* p, int network, int rank) {
  wired::launch(magi::comm::comm_put, *p, p->num_ctas, network, rank);
}
void relay(const magi_comm_relay_params* p, int network, int rank, int puts_late_ms) {
  const int puts = p->put.num_ctas;
  wired::launch(magi::comm::comm_relay, *p, puts + 1, network, rank, puts, puts_late_ms);
}
void wait(const magi_comm_wait_params* p, int network, int rank) {
  wired::launch(magi::comm::comm_wait, *p, 1, network, rank);
}
void sum(const magi_comm_sum_params* p, int network, int rank) {
  wired::launch(magi::comm::comm_sum, *p, p->num_ctas, network, rank);
}
void end(const magi_comm_end_params* p, int network, int rank) {
  wired::launch(magi::comm::comm_end, *p, 1, network, rank);
}
}
