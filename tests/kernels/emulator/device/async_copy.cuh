// SPDX-License-Identifier: Apache-2.0
// csrc/device/async_copy.cuh for the CPU: copies of 16 bytes by each thread, which are done at a
// random later time in any order.
#pragma once

#include "device/mbarrier.cuh"

namespace hopper {

inline void do_copy(const AsyncCopy& copy) {
  uint8_t* to = shared_at(copy.to, 16, "cp.async");
  if (copy.take)
    std::memcpy(to, copy.from, 16);
  else
    std::memset(to, 0, 16);
  mark_copied(copy.to);
}

inline void begin_copy(uint32_t to, const void* from, bool take) {
  if (take && reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fault("cp.async from an address that is not a multiple of 16");
  maybe_yield();
  begin_arrival(to, 16, "cp.async");
  auto& copies = self->copies;
  copies.push_back({to, static_cast<const uint8_t*>(from), take});
  if (!cta->random.one_in(4)) return;
  std::swap(copies[cta->random.below(static_cast<uint32_t>(copies.size()))], copies.back());
  do_copy(copies.back());
  copies.pop_back();
}

}  // namespace hopper

namespace magi {

inline void async_copy_16(uint32_t dst, const void* src) { hopper::begin_copy(dst, src, true); }

inline void async_copy_16_or_zero(uint32_t dst, const void* src, bool take) {
  hopper::begin_copy(dst, src, take);
}

inline void async_copies_arrive(uint32_t bar) {
  hopper::mbarrier(bar);
  hopper::Thread* thread = hopper::self;
  thread->batches.push_back(std::move(thread->copies));
  thread->copies.clear();
  const int64_t number = thread->first_batch + static_cast<int64_t>(thread->batches.size());
  ++thread->open_batches;
  hopper::later(hopper::Kind::kLoad, [=] {
    for (; thread->first_batch < number; ++thread->first_batch) {
      for (const auto& copy : thread->batches.front()) hopper::do_copy(copy);
      thread->batches.pop_front();
    }
    --thread->open_batches;
    hopper::arrive(bar, 0);
    hopper::wake(thread->own_work);
  });
}

inline void async_copies_wait_all() {
  hopper::Thread* thread = hopper::self;
  hopper::wait_until(
      thread->own_work, [=] { return thread->open_batches == 0; }, "cp.async.wait_all");
  for (const auto& copy : thread->copies) hopper::do_copy(copy);
  thread->copies.clear();
}

}  // namespace magi
