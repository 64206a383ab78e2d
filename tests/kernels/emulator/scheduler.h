// SPDX-License-Identifier: Apache-2.0
// Runs the CTAs of a grid. Which thread goes on is random, and a seed fixes it. Asynchronous work
// is kept aside and done at a random later time, at the latest when no thread can go on. Nobody can
// go on and there is no such work: a deadlock, which is an error with all that is waited for.
//
// CTAs that are on the device together have a thread of the CPU each, of which one runs at a time.
#pragma once

#include <sys/mman.h>

#include "barriers.h"

namespace hopper {

constexpr size_t kStackBytes = 256 << 10;

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

inline Cta::Cta(Index at, Dim3 grid_size, int count, uint32_t smem, uint64_t seed)
    : index(at), grid(grid_size), num_threads(count), smem_bytes(smem), random(seed) {
  if (count % 32 != 0) throw std::runtime_error("Threads come in warps of 32.");
  if (smem > sizeof magi::raw) throw std::runtime_error("More shared memory than there is.");
  // NaN, or numbers that are large in every dtype.
  std::memset(magi::raw, random.below(2) ? 0xff : 0x4b, sizeof magi::raw);
  marks.assign(sizeof magi::raw / 16, {});
  constexpr uint32_t kEagerness[] = {0, 1, 3, 30};
  eagerness = kEagerness[random.below(4)];
  ahead = static_cast<Ahead>(random.below(3));
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
  draw_priorities();
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

inline void Cta::draw_priorities() {
  late = static_cast<Kind>(random.below(static_cast<uint32_t>(Kind::kNone) + 1));
  uint32_t of_warp = 0;
  for (auto& t : threads) {
    if (t->index % 32 == 0) of_warp = random.below(4);
    t->priority = ahead == Ahead::kWarps   ? of_warp
                  : ahead == Ahead::kLanes ? !random.one_in(16)
                                           : 0;
  }
}

inline Thread* Cta::choose() {
  const uint32_t count = static_cast<uint32_t>(runnable.size());
  size_t at = random.below(count);
  // A warp that is ahead is mostly taken, and a lane that is ahead always.
  const uint32_t looks = ahead == Ahead::kNone ? 0 : ahead == Ahead::kWarps ? 5 : count;
  const uint32_t first = random.below(count);
  for (uint32_t i = 0; i < looks; ++i) {
    const size_t other = ahead == Ahead::kLanes ? (first + i) % count : random.below(count);
    if (runnable[other]->priority > runnable[at]->priority) at = other;
  }
  if (random.one_in(1000)) draw_priorities();
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

inline std::string Cta::waiting() const {
  std::map<std::string, std::vector<int>> by_text;  // threads that wait for the same together
  for (const auto& t : threads) {
    if (t->done) continue;
    const std::string at = t->waits_at;
    std::string what = text("%s, mask %08x", t->waits_at, t->waits_a);
    if (!t->blocked) {
      what = "nothing";
    } else if (at == "mbarrier") {
      const Mbarrier& bar = mbarriers.at(t->waits_a);
      what = text("mbarrier at %u, parity %u (phase %u; %d of %d arrivals and %lld bytes missing)",
                  t->waits_a - kSmemBase, t->waits_b, bar.phase, bar.pending, bar.count,
                  static_cast<long long>(bar.bytes));
    } else if (at == "barrier") {
      what = text("barrier %u of %u threads (%d have arrived)", t->waits_a, t->waits_b,
                  barriers[t->waits_a].arrived);
    }
    by_text[what].push_back(t->index);
  }
  std::string all = text("\n CTA %u", index.x);
  for (const auto& [what, who] : by_text) {
    all += "\n  threads ";
    for (size_t i = 0; i < who.size();) {
      size_t j = i;
      while (j + 1 < who.size() && who[j + 1] == who[j] + 1) ++j;
      all += text(i == j ? "%d " : "%d-%d ", who[i], who[j]);
      i = j + 1;
    }
    all += "wait for " + what;
  }
  return all;
}

// Whether any asynchronous work was done.
inline bool Cta::do_pending() {
  const size_t count = pending.size();
  size_t at = random.below(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count && pending[at].kind == late; ++i) at = (at + 1) % count;
  if (pending[at].kind == late && !runnable.empty()) return false;
  std::function<void()> work = std::move(pending[at].run);
  pending[at] = std::move(pending.back());
  pending.pop_back();
  progress();
  work();
  return true;
}

inline void Cta::step() {
  if (!pending.empty() && (runnable.empty() || (eagerness != 0 && random.one_in(eagerness))))
    if (do_pending()) return;
  if (is_behind()) return;
  if (runnable.empty()) throw std::runtime_error("A deadlock." + waiting());
  resume(choose());
  if (!error.empty()) throw std::runtime_error(error);
  // What is late may be what is looked for.
  if (idle_spins > 100 * num_threads && !pending.empty()) {
    eagerness = 1;
    late = Kind::kNone;
  }
}

inline void Cta::enter() {
  cta = this;
  blockIdx = index;
  gridDim = grid;
  blockDim = Dim3(num_threads);
}

inline void Cta::run(const std::function<void()>& kernel, const std::function<void()>& let_others) {
  body = kernel;
  struct End {
    Cta& c;
    ~End() {
      std::vector<uint8_t*> stacks;
      for (auto& t : c.threads) stacks.push_back(t->stack);
      take_stack(&stacks);
      self = nullptr;
    }
  } end{*this};
  enter();
  while (alive > 0) {
    step();
    if (random.one_in(100) || idle_spins > 4 * num_threads || is_behind()) {
      let_others();
      enter();
    }
  }
  if (open_loads != 0)
    throw std::runtime_error(text("CTA %u ends before its loads have arrived", index.x));
  while (!pending.empty()) do_pending();
}

}  // namespace hopper
