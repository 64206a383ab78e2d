// SPDX-License-Identifier: Apache-2.0
// Functions that kernels call without an include.
#pragma once

#include "barriers.h"

inline void __syncthreads() { hopper::meet_at(0, hopper::cta->num_threads, true); }
inline int __syncthreads_and(int mine) {
  return hopper::meet_at(0, hopper::cta->num_threads, mine != 0).all;
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
inline unsigned long long __shfl_sync(unsigned mask, unsigned long long value, int source) {
  const uint32_t low = __shfl_sync(mask, static_cast<uint32_t>(value), source);
  const uint32_t high = __shfl_sync(mask, static_cast<uint32_t>(value >> 32), source);
  return static_cast<unsigned long long>(high) << 32 | low;
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
// For signed numbers, by their order as unsigned ones.
inline int __reduce_min_sync(unsigned mask, int mine) {
  const unsigned flipped = __reduce_min_sync(mask, static_cast<unsigned>(mine) ^ 0x80000000u);
  return static_cast<int>(flipped ^ 0x80000000u);
}
inline int __reduce_max_sync(unsigned mask, int mine) { return ~__reduce_min_sync(mask, ~mine); }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { hopper::spin(); }
inline void __trap() { hopper::fault("__trap was called"); }

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
inline unsigned atomicOr(unsigned* at, unsigned other) {
  return hopper::change(at, [=](unsigned x) { return x | other; });
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
