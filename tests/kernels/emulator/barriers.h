// SPDX-License-Identifier: Apache-2.0
// What threads wait for each other by: mbarriers, barriers, and instructions to which the lanes of
// a warp come together.
#pragma once

#include "shared_memory.h"

namespace hopper {

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
