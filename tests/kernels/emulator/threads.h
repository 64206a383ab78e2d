// SPDX-License-Identifier: Apache-2.0
// Threads of a CTA on the CPU. They are fibers, which run one at a time; whatever waits hands over
// to the scheduler (scheduler.h).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace magi {
// The dynamic shared memory of a CTA, under the name that kernels give it.
inline thread_local uint8_t raw alignas(1024)[232448];
}  // namespace magi

namespace hopper {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Dim3 {
  unsigned x, y, z;
  Dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

}  // namespace hopper

using dim3 = hopper::Dim3;
inline hopper::Index threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

namespace hopper {

constexpr uint32_t kSmemBase = 1024;  // 32-bit address of `raw`; what is below belongs to CUDA

inline std::string text(const char* format, ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 24);
  }
  uint32_t below(uint32_t n) { return next() % n; }
  bool one_in(uint32_t n) { return next() % n == 0; }

 private:
  uint64_t state_;
};

struct Thread;

// Threads that wait for one thing. Whoever changes it wakes all of them; they look again.
struct Waiters {
  std::vector<Thread*> threads;
};

// A transaction barrier in shared memory.
struct Mbarrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;  // announced and not yet arrived; negative where they come first
  uint32_t phase = 0;
  int initialiser = 0;  // the thread, and its fences so far
  uint32_t initialised = 0;
  Waiters waiters;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  uint32_t phase = 0;
  bool any = false, all = true, told_any[2] = {}, told_all[2] = {};  // by the parity of the phase
  std::vector<int> lanes_of_warp;
  Waiters waiters;
};

enum class Collective { kSync, kShuffle, kAny, kBallot, kMin, kElect, kMatrix };
constexpr const char* kCollectiveNames[] = {"__syncwarp",    "a shuffle",   "__any_sync",
                                            "__ballot_sync", "a reduction", "elect.sync",
                                            "stmatrix"};

// Lanes of a warp that meet at one instruction.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  Collective what{};
  uint32_t values[32], sources[32];
  const void* extra[32];
};

struct Warp;
struct Mma;              // see ffa/sm90/wgmma.cuh
struct AccumulatorTile;  // likewise

// Registers of a thread to which so many multiplications will add.
struct Accumulating {
  float* d;
  std::shared_ptr<AccumulatorTile> tile;
  int multiplications;
};

// Registers that were an operand of a multiplication, and what they held at the last wgmma_fence.
struct KnownOperand {
  const uint32_t* at;
  uint32_t values[4];
};

struct AsyncCopy {
  uint32_t to;
  const uint8_t* from;
  bool take;
};

// A group of bulk stores: how many have to read shared memory yet, and how many to write.
struct StoreGroup {
  int unread = 0, unwritten = 0;
};

struct Thread {
  jmp_buf context;
  ucontext_t first;
  uint8_t* stack = nullptr;
  int index = 0;
  bool started = false, done = false, blocked = false;
  uint32_t priority = 0;
  bool apart = false;  // has waited alone since its warp met
  Warp* warp = nullptr;
  const char* waits_at = "";
  uint32_t waits_a = 0, waits_b = 0;
  uint32_t result = 0;  // of a collective
  uint32_t fences = 0;  // of the async proxy, so far
  // Multiplications.
  int64_t issued = 0;
  std::vector<int64_t> commits;
  bool wgmma_fenced = false;  // since its last wait for multiplications
  std::vector<Accumulating> accumulating;
  std::vector<KnownOperand> operands;
  // Copies of 16 bytes: those behind the last arrival, and those that an arrival waits for.
  std::vector<AsyncCopy> copies;
  std::deque<std::vector<AsyncCopy>> batches;
  int64_t first_batch = 0;
  int open_batches = 0;
  Waiters own_work;  // this thread, for its copies or stores
  // Bulk stores: groups that are committed, and one that is open.
  std::deque<std::shared_ptr<StoreGroup>> groups;
  std::shared_ptr<StoreGroup> open_group = std::make_shared<StoreGroup>();
};

struct Warp {
  std::vector<Meeting*> meetings;
  int leader = 0;  // of elect.sync
  std::deque<std::shared_ptr<Mma>> queue;
  int64_t first_queued = 0;  // number of queue.front()
  Waiters multiplied;
};

// Who has written 16 bytes of shared memory, and not yet said so to the async proxy; and whether a
// copy to them is under way.
struct Mark {
  int32_t thread = -1;  // -1: nobody; -2: an asynchronous copy
  uint32_t when = 0;
  bool is_awaited = false;
};

// Asynchronous work. That of one kind may be the last to be done for a while.
enum class Kind { kLoad, kMultiply, kStoreRead, kStoreWrite, kNone };
struct Work {
  Kind kind;
  std::function<void()> run;
};

// Who runs ahead of others for a while.
enum class Ahead { kNone, kWarps, kLanes };

struct Cta {
  Cta(Index at, Dim3 grid_size, int threads, uint32_t smem, uint64_t seed);
  // Until all threads have ended. `let_others` gives the other CTAs a chance now and then.
  void run(const std::function<void()>& body, const std::function<void()>& let_others);
  std::string waiting() const;  // who waits where
  // Whether nothing can be done here before the kernel before has ended.
  bool is_behind() const {
    return runnable.empty() && pending.empty() && !behind.threads.empty() && !*before_is_over;
  }
  // The kernel before has ended.
  void go_on() {
    for (Thread* t : behind.threads) {
      t->blocked = false;
      runnable.push_back(t);
    }
    behind.threads.clear();
  }

  Index index;
  Dim3 grid;
  int num_threads;
  uint32_t smem_bytes;
  Random random;
  uint32_t eagerness;  // asynchronous work is done in one of so many steps; 0: as late as possible
  Ahead ahead;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Thread*> runnable;
  std::vector<Work> pending;
  Kind late = Kind::kNone;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier barriers[16];
  std::vector<Mark> marks;
  uint32_t copies_done = 1, copies_fenced = 0;
  int alive = 0, open_loads = 0;
  bool lets_next = false;                // begin
  const bool* before_is_over = nullptr;  // NULL: there is none
  Waiters behind;
  std::string error;
  jmp_buf scheduler;
  std::function<void()> body;

 private:
  void enter();
  void step();
  bool do_pending();
  void draw_priorities();
  Thread* choose();
  void resume(Thread* t);
};

// What runs now.
inline Cta* cta = nullptr;
inline Thread* self = nullptr;
// How often threads have looked for something in vain since anything happened.
inline int64_t idle_spins = 0;

// A mistake of the kernel: the launch ends with it.
[[noreturn]] inline void fault(const std::string& what) {
  if (cta->error.empty())
    cta->error =
        self == nullptr ? what : text("CTA %u, thread %d: ", cta->index.x, self->index) + what;
  if (self == nullptr) throw std::runtime_error(cta->error);
  _longjmp(cta->scheduler, 1);
}

// Back to the scheduler. Out of line: it returns when the thread is resumed.
[[gnu::noinline]] inline void hand_over() {
  if (_setjmp(self->context) == 0) _longjmp(cta->scheduler, 1);
}

inline void yield() {
  cta->runnable.push_back(self);
  hand_over();
}

// Before what another thread may see.
inline void maybe_yield() {
  if (cta->random.one_in(8)) yield();
}

// In a loop that looks for what another thread does.
inline void spin() {
  ++idle_spins;
  yield();
}

inline void progress() { idle_spins = 0; }

template <typename Ready>
void wait_until(Waiters& waiters, Ready ready, const char* at, uint32_t a = 0, uint32_t b = 0) {
  while (!ready()) {
    self->waits_at = at;
    self->waits_a = a;
    self->waits_b = b;
    waiters.threads.push_back(self);
    self->blocked = true;
    hand_over();
  }
}

inline void wake(Waiters& waiters) {
  progress();
  for (Thread* t : waiters.threads) {
    t->blocked = false;
    cta->runnable.push_back(t);
  }
  waiters.threads.clear();
}

// Work that is done some time.
inline void later(Kind kind, std::function<void()> work) {
  cta->pending.push_back({kind, std::move(work)});
}

}  // namespace hopper
