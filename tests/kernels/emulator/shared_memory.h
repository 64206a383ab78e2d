// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA, and for each 16 bytes whether a copy to them is under way, and who wrote
// them without a fence.
#pragma once

#include "threads.h"

namespace hopper {

// Variables that are shared without being in the dynamic shared memory lie near it, before or
// behind. Their 32-bit addresses count from a base of their own.
constexpr int64_t kStaticReach = 4 << 20;
constexpr uint32_t kStaticBase = 1u << 30;

inline bool is_dynamic(uint32_t address) { return address - kSmemBase < sizeof magi::raw; }

inline uint32_t address_of(const uint8_t* pointer) {
  const int64_t offset = pointer - magi::raw;
  if (offset >= 0 && offset < static_cast<int64_t>(sizeof magi::raw))
    return kSmemBase + static_cast<uint32_t>(offset);
  if (offset < -kStaticReach || offset > kStaticReach) fault("The address of no shared memory");
  return kStaticBase + static_cast<uint32_t>(offset);
}

inline uint8_t* shared_at(uint32_t address, uint32_t bytes, const char* who) {
  int64_t offset = static_cast<int64_t>(address) - kStaticBase;
  if (offset < -kStaticReach || offset > kStaticReach) {
    offset = static_cast<int64_t>(address) - kSmemBase;
    if (offset < 0 || offset + bytes > cta->smem_bytes)
      fault(text("%s touches %u bytes at %lld of a shared memory of %u bytes", who, bytes,
                 static_cast<long long>(offset), cta->smem_bytes));
  }
  if (address % bytes != 0 && bytes <= 16)
    fault(text("%s touches %u bytes at the address %u, which is not a multiple", who, bytes,
               address));
  return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(magi::raw) + offset);
}

// What a thread writes is seen by the async proxy, which are wgmma and bulk copies, only behind a
// fence.

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

// fence.proxy.async. For copies it is enough that any thread calls it, which must have waited for
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

}  // namespace hopper
