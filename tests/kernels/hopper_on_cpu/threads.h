// SPDX-License-Identifier: Apache-2.0
// A CTA on the CPU. Its threads are fibers, which run one at a time in a random order that a seed
// fixes; whatever waits hands over to another. Asynchronous work is kept aside and done at a random
// later time, at the latest when no thread can go on. Nobody can go on and there is no such work:
// a deadlock, which is an error with all that is waited for.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
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
constexpr size_t kStackBytes = 256 << 10;

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
  Warp* warp = nullptr;
  const char* waits_at = "";
  uint32_t waits_a = 0, waits_b = 0;
  uint32_t result = 0;  // of a collective
  uint32_t fences = 0;  // of the async proxy, so far
  // Multiplications.
  int64_t issued = 0;
  std::vector<int64_t> commits;
  bool wgmma_fenced = false;
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
  uint32_t priority = 0;
  std::deque<std::shared_ptr<Mma>> queue;
  int64_t first_queued = 0;  // number of queue.front()
  Waiters multiplied;
};

// Who has written 16 bytes of shared memory, and not yet said so to the async proxy.
struct Mark {
  int32_t thread = -1;  // -1: nobody; -2: an asynchronous copy
  uint32_t when = 0;
};

struct Cta {
  Cta(Index at, Dim3 grid_size, int threads, uint32_t smem, uint64_t seed);
  void run(const std::function<void()>& body);

  Index index;
  Dim3 grid;
  int num_threads;
  uint32_t smem_bytes;
  Random random;
  uint32_t eagerness;  // asynchronous work is done in one of so many steps; 0: as late as possible
  bool biased;         // some warps run ahead of others
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Thread*> runnable;
  std::vector<std::function<void()>> pending;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier barriers[16];
  std::vector<Mark> marks;
  uint32_t copies_done = 1, copies_fenced = 0;
  int alive = 0;
  int64_t idle_spins = 0;
  std::string error;
  jmp_buf scheduler;
  std::function<void()> body;

 private:
  void step();
  Thread* choose();
  void resume(Thread* t);
  [[noreturn]] void deadlock(const char* what);
};

// What runs now.
inline Cta* cta = nullptr;
inline Thread* self = nullptr;

// Stacks are kept for the next launch.
inline uint8_t* take_stack(std::vector<uint8_t*>* give_back = nullptr) {
  static std::vector<uint8_t*> free;
  if (give_back != nullptr) {
    free.insert(free.end(), give_back->begin(), give_back->end());
    return nullptr;
  }
  if (!free.empty()) {
    uint8_t* stack = free.back();
    free.pop_back();
    return stack;
  }
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) throw std::runtime_error("No memory for the stacks of threads.");
  return static_cast<uint8_t*>(stack);
}

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
  ++cta->idle_spins;
  yield();
}

inline void progress() { cta->idle_spins = 0; }

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

inline uint32_t address_of(const uint8_t* pointer) {
  if (pointer < magi::raw || pointer >= magi::raw + sizeof magi::raw)
    fault("A shared variable that is not in the dynamic shared memory");
  return kSmemBase + static_cast<uint32_t>(pointer - magi::raw);
}

inline uint8_t* shared_at(uint32_t address, uint32_t bytes, const char* who) {
  if (address < kSmemBase || address - kSmemBase + bytes > cta->smem_bytes)
    fault(text("%s touches %u bytes at %u of a shared memory of %u bytes", who, bytes,
               address - kSmemBase, cta->smem_bytes));
  if (address % bytes != 0 && bytes <= 16)
    fault(text("%s touches %u bytes at %u, which is not a multiple", who, bytes, address));
  return magi::raw + (address - kSmemBase);
}

// ---- proxies: what a thread writes is seen by wgmma and bulk copies only behind a fence.

inline void mark_written(uint32_t address, uint32_t bytes, const Thread& writer) {
  for (uint32_t i = (address - kSmemBase) / 16; i <= (address - kSmemBase + bytes - 1) / 16; ++i)
    cta->marks[i] = {writer.index, writer.fences};
}

inline void mark_copied(uint32_t address) {
  cta->marks[(address - kSmemBase) / 16] = {-2, cta->copies_done};
}

inline void mark_clean(uint32_t address, uint32_t bytes) {
  for (uint32_t i = (address - kSmemBase) / 16; i <= (address - kSmemBase + bytes - 1) / 16; ++i)
    cta->marks[i] = {};
}

// fence.proxy.async. Of copies it is enough that any thread calls it, which must have waited for
// them.
inline void fence() {
  ++self->fences;
  cta->copies_fenced = ++cta->copies_done;
}

// By the async proxy.
inline void check_fenced(uint32_t address, const char* who) {
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

inline void complete_bytes(uint32_t address, int64_t bytes) {
  Mbarrier& bar = mbarrier(address);
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
      if (!(mask >> l & 1) || l == lane) continue;
      Thread* t = cta->threads[self->index - lane + l].get();
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

// ---- the scheduler

inline Cta::Cta(Index at, Dim3 grid_size, int count, uint32_t smem, uint64_t seed)
    : index(at), grid(grid_size), num_threads(count), smem_bytes(smem), random(seed) {
  if (count % 32 != 0) throw std::runtime_error("Threads come in warps of 32.");
  if (smem > sizeof magi::raw) throw std::runtime_error("More shared memory than there is.");
  std::memset(magi::raw, 0xff, sizeof magi::raw);  // NaN
  marks.assign(sizeof magi::raw / 16, {});
  constexpr uint32_t kEagerness[] = {0, 1, 3, 30};
  eagerness = kEagerness[random.below(4)];
  biased = random.one_in(2);
  for (int i = 0; i < count; ++i) {
    if (i % 32 == 0) {
      warps.push_back(std::make_unique<Warp>());
      warps.back()->leader = random.below(32);
    }
    threads.push_back(std::make_unique<Thread>());
    threads.back()->index = i;
    threads.back()->warp = warps.back().get();
    threads.back()->stack = take_stack();
    runnable.push_back(threads.back().get());
  }
  alive = count;
}

inline void check_left_nothing() {
  int unread = self->open_group->unread;
  for (const auto& group : self->groups) unread += group->unread;
  if (unread != 0) fault("The thread ends before its bulk stores have read shared memory");
  if (!self->warp->queue.empty() && self->issued > self->warp->first_queued)
    fault("The thread ends before its multiplications");
  if (!self->copies.empty() || self->open_batches != 0)
    fault("The thread ends before its asynchronous copies");
}

inline void enter_thread() {
  cta->body();
  check_left_nothing();
  self->done = true;
  --cta->alive;
  progress();
  _longjmp(cta->scheduler, 1);
}

inline Thread* Cta::choose() {
  size_t at = random.below(static_cast<uint32_t>(runnable.size()));
  if (biased) {
    for (int tries = 0; tries < 3; ++tries) {
      const size_t other = random.below(static_cast<uint32_t>(runnable.size()));
      if (runnable[other]->warp->priority > runnable[at]->warp->priority) at = other;
    }
    if (random.one_in(1000))
      for (auto& warp : warps) warp->priority = random.below(4);
  }
  Thread* t = runnable[at];
  runnable[at] = runnable.back();
  runnable.pop_back();
  return t;
}

[[gnu::noinline]] inline void Cta::resume(Thread* t) {
  self = t;
  threadIdx.x = t->index;
  if (_setjmp(scheduler) == 0) {
    if (t->started) _longjmp(t->context, 1);
    t->started = true;
    getcontext(&t->first);
    t->first.uc_stack.ss_sp = t->stack;
    t->first.uc_stack.ss_size = kStackBytes;
    t->first.uc_link = nullptr;
    makecontext(&t->first, enter_thread, 0);
    setcontext(&t->first);
  }
  self = nullptr;
}

inline void Cta::deadlock(const char* what) {
  // Threads that wait for the same are told together.
  std::map<std::string, std::vector<int>> by_text;
  for (const auto& t : threads) {
    if (t->done) continue;
    const std::string at = t->waits_at;
    if (!t->blocked)
      by_text["run"].push_back(t->index);
    else if (at == "mbarrier") {
      const Mbarrier& bar = mbarriers[t->waits_a];
      by_text[text("mbarrier at %u, parity %u (phase %u; %d of %d arrivals and %lld bytes missing)",
                   t->waits_a - kSmemBase, t->waits_b, bar.phase, bar.pending, bar.count,
                   static_cast<long long>(bar.bytes))]
          .push_back(t->index);
    } else if (at == "barrier") {
      by_text[text("barrier %u of %u threads (%d have arrived)", t->waits_a, t->waits_b,
                   barriers[t->waits_a].arrived)]
          .push_back(t->index);
    } else {
      by_text[text("%s, mask %08x", t->waits_at, t->waits_a)].push_back(t->index);
    }
  }
  std::string all = text("CTA %u: %s.", index.x, what);
  for (const auto& [where, who] : by_text) {
    all += "\n  threads ";
    for (size_t i = 0; i < who.size();) {
      size_t j = i;
      while (j + 1 < who.size() && who[j + 1] == who[j] + 1) ++j;
      all += text(i == j ? "%d " : "%d-%d ", who[i], who[j]);
      i = j + 1;
    }
    all += "wait at " + where;
  }
  throw std::runtime_error(all);
}

inline void Cta::step() {
  if (!pending.empty() && (runnable.empty() || (eagerness != 0 && random.one_in(eagerness)))) {
    const size_t at = random.below(static_cast<uint32_t>(pending.size()));
    std::function<void()> work = std::move(pending[at]);
    pending[at] = std::move(pending.back());
    pending.pop_back();
    progress();
    work();
    return;
  }
  if (runnable.empty()) deadlock("A deadlock");
  resume(choose());
  if (!error.empty()) throw std::runtime_error(error);
  if (idle_spins > 1000 + 200 * num_threads) {
    // Work that is late may be what is looked for.
    if (pending.empty()) deadlock("Threads look for what nobody does");
    eagerness = 1;
  }
}

inline void Cta::run(const std::function<void()>& kernel) {
  body = kernel;
  cta = this;
  blockIdx = index;
  gridDim = grid;
  blockDim = Dim3(num_threads);
  struct End {
    Cta& c;
    ~End() {
      std::vector<uint8_t*> stacks;
      for (auto& t : c.threads) stacks.push_back(t->stack);
      take_stack(&stacks);
      self = nullptr;
    }
  } end{*this};
  while (alive > 0) step();
  while (!pending.empty()) {
    std::function<void()> work = std::move(pending.back());
    pending.pop_back();
    work();
  }
}

// Runs a kernel, a CTA after the other. Throws std::runtime_error for a mistake of the kernel.
template <typename Params>
void run_grid(Dim3 grid, int threads, uint32_t smem_bytes, void (*kernel)(Params),
              const Params& params, uint64_t seed) {
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        Index at;
        at.x = x, at.y = y, at.z = z;
        Cta one(at, grid, threads, smem_bytes, seed + 7919 * (x + grid.x * (y + grid.y * z)));
        one.run([&] { kernel(params); });
      }
}

// Of the next launch by the runtime; each takes another.
inline uint64_t launch_seed = 0;

// For functions that Python calls: NULL, or what went wrong, until the next call.
template <typename Call>
const char* error_of(Call call) {
  static std::string kept;
  try {
    call();
    return nullptr;
  } catch (const std::exception& e) {
    kept = e.what();
    return kept.c_str();
  }
}

}  // namespace hopper

// ---- what kernels call

inline void __syncthreads() { hopper::meet_at(0, hopper::cta->num_threads, true); }
inline int __syncthreads_and(int mine) {
  return hopper::meet_at(0, hopper::cta->num_threads, mine != 0).all;
}
inline int __syncthreads_or(int mine) {
  return hopper::meet_at(0, hopper::cta->num_threads, mine != 0).any;
}
inline void __syncwarp(unsigned mask = 0xffffffff) {
  hopper::all_lanes(mask, hopper::Collective::kSync, 0, 0,
                    [](const hopper::Meeting&, int) { return 0u; });
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return hopper::bits_as<T>(hopper::all_lanes(
      mask, hopper::Collective::kShuffle, hopper::bits_as<uint32_t>(value), source & 31,
      [](const hopper::Meeting& m, int lane) { return m.values[m.sources[lane]]; }));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  return __shfl_sync(mask, value, static_cast<int>(hopper::self->index % 32) ^ with);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  const int lane = hopper::self->index % 32;
  return __shfl_sync(mask, value, lane >= by ? lane - by : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by) {
  const int lane = hopper::self->index % 32;
  return __shfl_sync(mask, value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  return hopper::all_lanes(mask, hopper::Collective::kBallot, mine, 0,
                           [](const hopper::Meeting& m, int) {
                             uint32_t all = 0;
                             for (int l = 0; l < 32; ++l)
                               if (m.mask >> l & 1) all |= m.values[l] << l;
                             return all;
                           });
}
inline int __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline int __all_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) == mask; }
inline unsigned __reduce_min_sync(unsigned mask, unsigned mine) {
  return hopper::all_lanes(mask, hopper::Collective::kMin, mine, 0,
                           [](const hopper::Meeting& m, int) {
                             uint32_t least = ~0u;
                             for (int l = 0; l < 32; ++l)
                               if (m.mask >> l & 1) least = min(least, m.values[l]);
                             return least;
                           });
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { hopper::spin(); }
inline void __trap() { hopper::fault("__trap was called"); }

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}

namespace hopper {
template <typename T, typename New>
T change(T* at, New new_value) {
  maybe_yield();
  progress();
  const T before = *at;
  *at = new_value(before);
  return before;
}
}  // namespace hopper

template <typename T, typename U>
T atomicAdd(T* at, U more) {
  return hopper::change(at, [=](T x) { return static_cast<T>(x + static_cast<T>(more)); });
}
template <typename T, typename U>
T atomicMax(T* at, U other) {
  return hopper::change(at, [=](T x) { return max(x, static_cast<T>(other)); });
}
template <typename T, typename U>
T atomicMin(T* at, U other) {
  return hopper::change(at, [=](T x) { return min(x, static_cast<T>(other)); });
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return hopper::change(at, [=](unsigned x) { return x >= last ? 0 : x + 1; });
}
template <typename T>
T atomicExch(T* at, T value) {
  return hopper::change(at, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  return hopper::change(at, [=](T x) { return x == expected ? value : x; });
}
