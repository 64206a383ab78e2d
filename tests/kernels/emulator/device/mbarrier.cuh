// SPDX-License-Identifier: Apache-2.0
// csrc/device/mbarrier.cuh for the CPU.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/ring.cuh"
#include "cuda_runtime.h"

namespace magi {

inline uint32_t smem_addr(const void* pointer) {
  return hopper::address_of(static_cast<const uint8_t*>(pointer));
}

inline void mbar_init(uint32_t bar, uint32_t arrivals) {
  hopper::shared_at(bar, 8, "mbar_init");
  hopper::Mbarrier& it = hopper::cta->mbarriers[bar];
  if (!it.waiters.threads.empty()) hopper::fault("mbar_init of a barrier at which threads wait");
  it.count = it.pending = static_cast<int>(arrivals);
  it.bytes = it.phase = 0;
  it.initialiser = hopper::self->index;
  it.initialised = hopper::self->fences;
}

inline void mbar_init_fence() { hopper::fence(); }

inline void mbar_arrive(uint32_t bar) {
  hopper::maybe_yield();
  hopper::arrive(bar, 0);
}

inline void mbar_expect(uint32_t bar, uint32_t bytes) {
  hopper::maybe_yield();
  hopper::arrive(bar, bytes);
}

// May say no although it is over, as the instruction may that was just too early.
inline bool mbar_test(uint32_t bar, uint32_t parity) {
  hopper::Mbarrier& it = hopper::mbarrier(bar);
  hopper::spin();
  return (it.phase & 1) != parity && !hopper::cta->random.one_in(4);
}

inline void mbar_wait(uint32_t bar, uint32_t parity) {
  hopper::maybe_yield();
  hopper::Mbarrier& it = hopper::mbarrier(bar);
  hopper::self->apart = true;
  hopper::wait_until(it.waiters, [&] { return (it.phase & 1) != parity; }, "mbarrier", bar, parity);
}

inline bool elect_one() {
  return hopper::all_lanes(0xffffffff, hopper::Collective::kElect, 0, 0,
                           [](const hopper::Meeting&, int lane) {
                             return static_cast<uint32_t>(lane == hopper::self->warp->leader);
                           }) != 0;
}

inline bool any_at_barrier(int id, int threads, bool mine) {
  return hopper::meet_at(id, threads, mine).any;
}

inline void named_barrier(int id, int threads) { hopper::meet_at(id, threads, false); }

template <int kRegisters>
void registers_grow() {}

template <int kRegisters>
void registers_shrink() {}

}  // namespace magi
