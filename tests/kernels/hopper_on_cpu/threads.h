// SPDX-License-Identifier: Apache-2.0
// Threads of a CTA on the CPU, their shared memory, and all that they wait for each other by. They
// are fibers, which run one at a time; whatever waits hands over to the scheduler (scheduler.h).
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

// Who runs ahead of others for a while.
enum class Ahead { kNone, kWarps, kLanes };

struct Cta {
  Cta(Index at, Dim3 grid_size, int threads, uint32_t smem, uint64_t seed);
  // Until all threads have ended. `let_others` gives the other CTAs a chance now and then.
  void run(const std::function<void()>& body, const std::function<void()>& let_others);
  std::string waiting() const;  // who waits where

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
  std::vector<std::function<void()>> pending;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier barriers[16];
  std::vector<Mark> marks;
  uint32_t copies_done = 1, copies_fenced = 0;
  int alive = 0, open_loads = 0;
  std::string error;
  jmp_buf scheduler;
  std::function<void()> body;

 private:
  void enter();
  void step();
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
inline void later(std::function<void()> work) { cta->pending.push_back(std::move(work)); }

// Variables that are shared without being in the dynamic shared memory lie near it, before or
// behind.
constexpr int64_t kStaticReach = 4 << 20;

inline uint32_t address_of(const uint8_t* pointer) {
  const int64_t offset = pointer - magi::raw;
  if (offset < -kStaticReach || offset > kStaticReach) fault("The address of no shared memory");
  return kSmemBase + static_cast<uint32_t>(offset);
}

inline bool is_dynamic(uint32_t address) { return address - kSmemBase < sizeof magi::raw; }

inline uint8_t* shared_at(uint32_t address, uint32_t bytes, const char* who) {
  const int32_t offset = static_cast<int32_t>(address - kSmemBase);
  const bool is_static = !is_dynamic(address) && offset > -kStaticReach && offset < kStaticReach &&
                         address >= kSmemBase;
  if (!is_static && (!is_dynamic(address) || offset + bytes > cta->smem_bytes))
    fault(text("%s touches %u bytes at %d of a shared memory of %u bytes", who, bytes, offset,
               cta->smem_bytes));
  if (address % bytes != 0 && bytes <= 16)
    fault(text("%s touches %u bytes at %d, which is not a multiple", who, bytes, offset));
  return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(magi::raw) + offset);
}

// ---- proxies: what a thread writes is seen by wgmma and bulk copies only behind a fence.

template <typename Change>
void for_marks(uint32_t address, uint32_t bytes, Change change) {
  if (!is_dynamic(address)) return;
  for (uint32_t i = (address - kSmemBase) / 16; i <= (address - kSmemBase + bytes - 1) / 16; ++i)
    change(cta->marks[i]);
}

inline void check_arrived(uint32_t address, uint32_t bytes, const char* who) {
  for_marks(address, bytes, [&](const Mark& mark) {
    if (mark.is_awaited)
      fault(text("%s touches shared memory at %u, and a copy to that has not arrived yet", who,
                 address - kSmemBase));
  });
}

inline void mark_written(uint32_t address, uint32_t bytes, const Thread& writer) {
  for_marks(address, bytes, [&](Mark& mark) { mark = {writer.index, writer.fences, false}; });
}

inline void mark_copied(uint32_t address) {
  for_marks(address, 16, [](Mark& mark) { mark = {-2, cta->copies_done, false}; });
}

inline void mark_clean(uint32_t address, uint32_t bytes) {
  for_marks(address, bytes, [](Mark& mark) { mark = {}; });
}

// A copy to shared memory begins.
inline void begin_arrival(uint32_t address, uint32_t bytes, const char* who) {
  std::memset(shared_at(address, bytes, who), 0xff, bytes);
  check_arrived(address, bytes, who);
  for_marks(address, bytes, [](Mark& mark) { mark.is_awaited = true; });
}

// fence.proxy.async. Of copies it is enough that any thread calls it, which must have waited for
// them.
inline void fence() {
  ++self->fences;
  cta->copies_fenced = ++cta->copies_done;
}

// By the async proxy.
inline void check_fenced(uint32_t address, const char* who) {
  if (!is_dynamic(address)) return;
  check_arrived(address, 16, who);
  const Mark& mark = cta->marks[(address - kSmemBase) / 16];
  if (mark.thread == -1) return;
  if (mark.thread == -2) {
    if (mark.when < cta->copies_fenced) return;
    fault(
        text("%s reads shared memory at %u that cp.async wrote, and no thread has called "
             "fence_async_proxy since",
             who, address - kSmemBase));
  }
  if (cta->threads[mark.thread]->fences != mark.when) return;
  fault(
      text("%s reads shared memory at %u that thread %d wrote, which has not called "
           "fence_async_proxy since",
           who, address - kSmemBase, mark.thread));
}

// ---- mbarriers

inline Mbarrier& mbarrier(uint32_t address) {
  const auto found = cta->mbarriers.find(address);
  if (found == cta->mbarriers.end())
    fault(text("There is no initialised mbarrier at %u", address - kSmemBase));
  return found->second;
}

inline void settle(Mbarrier& bar) {
  if (bar.pending != 0 || bar.bytes != 0) return;
  bar.pending = bar.count;
  ++bar.phase;
  wake(bar.waiters);
}

inline void arrive(uint32_t address, int64_t bytes) {
  Mbarrier& bar = mbarrier(address);
  if (bar.pending == 0)
    fault(text("mbarrier at %u gets more than %d arrivals in phase %u", address - kSmemBase,
               bar.count, bar.phase));
  bar.bytes += bytes;
  --bar.pending;
  settle(bar);
}

// By the async proxy.
inline void complete_bytes(uint32_t address, int64_t bytes) {
  Mbarrier& bar = mbarrier(address);
  if (cta->threads[bar.initialiser]->fences == bar.initialised)
    fault(
        text("A load arrives at the mbarrier at %u, and mbar_init_fence was not called after "
             "mbar_init",
             address - kSmemBase));
  bar.bytes -= bytes;
  settle(bar);
}

// ---- barriers among threads

struct Told {
  bool any, all;
};

inline Told meet_at(int id, int threads, bool mine) {
  if (id < 0 || id > 15) fault(text("There is no barrier %d", id));
  NamedBarrier& bar = cta->barriers[id];
  if (threads % 32 != 0) fault(text("%d threads are no whole warps", threads));
  if (bar.arrived != 0 && bar.threads != threads)
    fault(text("Barrier %d is for %d threads here and for %d elsewhere", id, threads, bar.threads));
  bar.threads = threads;
  if (bar.lanes_of_warp.empty()) bar.lanes_of_warp.assign(cta->warps.size(), 0);
  ++bar.lanes_of_warp[self->index / 32];
  bar.any |= mine;
  bar.all &= mine;
  const uint32_t phase = bar.phase;
  if (++bar.arrived == threads) {
    for (int& lanes : bar.lanes_of_warp) {
      if (lanes % 32 != 0) fault(text("Barrier %d: some lanes of a warp arrive, others not", id));
      lanes = 0;
    }
    bar.told_any[phase & 1] = bar.any;
    bar.told_all[phase & 1] = bar.all;
    bar.any = false;
    bar.all = true;
    bar.arrived = 0;
    ++bar.phase;
    wake(bar.waiters);
    maybe_yield();
  } else {
    wait_until(bar.waiters, [&] { return bar.phase != phase; }, "barrier", id, threads);
  }
  self->apart = false;
  return {bar.told_any[phase & 1], bar.told_all[phase & 1]};
}

// ---- warps

// The lanes of `mask` meet; the last one calls `finish`, which sets `result` of each.
template <typename Finish>
uint32_t meet_in_warp(uint32_t mask, Collective what, uint32_t value, uint32_t source,
                      const void* extra, Finish finish) {
  Warp& warp = *self->warp;
  const int lane = self->index % 32;
  if (!(mask >> lane & 1)) fault(text("Lane %d is not in its own mask %08x", lane, mask));
  Meeting* meeting = nullptr;
  for (Meeting* m : warp.meetings) {
    if (m->mask == mask) meeting = m;
    if (m->mask != mask && (m->arrived >> lane & 1)) fault("A lane is in two collectives");
  }
  if (meeting == nullptr) {
    meeting = new Meeting;
    meeting->mask = mask;
    meeting->what = what;
    warp.meetings.push_back(meeting);
  }
  if (meeting->what != what)
    fault(text("Lanes of a warp meet at %s and at %s",
               kCollectiveNames[static_cast<int>(meeting->what)],
               kCollectiveNames[static_cast<int>(what)]));
  meeting->arrived |= 1u << lane;
  meeting->values[lane] = value;
  meeting->sources[lane] = source;
  meeting->extra[lane] = extra;
  if (meeting->arrived == mask) {
    warp.meetings.erase(std::find(warp.meetings.begin(), warp.meetings.end(), meeting));
    finish(*meeting);
    progress();
    for (int l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      Thread* t = cta->threads[self->index - lane + l].get();
      t->apart &= mask != 0xffffffff;
      if (l == lane) continue;
      t->blocked = false;
      cta->runnable.push_back(t);
    }
    delete meeting;
    maybe_yield();
  } else {
    self->waits_at = kCollectiveNames[static_cast<int>(what)];
    self->waits_a = mask;
    self->blocked = true;
    hand_over();
  }
  return self->result;
}

// Before an instruction that all lanes have to come to together, where no wait may have taken them
// apart.
inline void check_together(const char* what) {
  if (self->apart) fault(text("%s after a wait, without a __syncwarp between them", what));
}

inline Thread& lane_of_warp(int lane) {
  return *cta->threads[self->index - self->index % 32 + lane];
}

// Each lane's result from the values of all.
template <typename Result>
uint32_t all_lanes(uint32_t mask, Collective what, uint32_t value, uint32_t source,
                   Result result_of) {
  return meet_in_warp(mask, what, value, source, nullptr, [&](Meeting& m) {
    for (int l = 0; l < 32; ++l)
      if (m.mask >> l & 1) lane_of_warp(l).result = result_of(m, l);
  });
}

}  // namespace hopper
