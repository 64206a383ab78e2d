// SPDX-License-Identifier: Apache-2.0
// csrc/device/shared.cuh for the CPU.
#pragma once

#include "cuda_runtime.h"

namespace hopper {
template <typename T>
T load_shared(uint32_t address) {
  if (cta->random.one_in(16)) yield();
  T value;
  check_arrived(address, sizeof(T), "A load");
  std::memcpy(&value, shared_at(address, sizeof(T), "A load"), sizeof(T));
  return value;
}
template <typename T>
void store_shared(uint32_t address, T value) {
  maybe_yield();
  check_arrived(address, sizeof(T), "A store");
  std::memcpy(shared_at(address, sizeof(T), "A store"), &value, sizeof(T));
  mark_written(address, sizeof(T), *self);
}
}  // namespace hopper

namespace magi {

inline int4 lds_int4(uint32_t address) { return hopper::load_shared<int4>(address); }
inline uint4 lds_uint4(uint32_t address) { return hopper::load_shared<uint4>(address); }
inline int lds_int(uint32_t address) { return hopper::load_shared<int>(address); }
inline int2 lds_int2(uint32_t address) { return hopper::load_shared<int2>(address); }
inline float2 lds_float2(uint32_t address) { return hopper::load_shared<float2>(address); }
inline float4 lds_float4(uint32_t address) { return hopper::load_shared<float4>(address); }
inline int lds_acquire(uint32_t address) {
  hopper::spin();
  return hopper::load_shared<int>(address);
}
inline void sts_release(uint32_t address, int a) {
  hopper::store_shared(address, a);
  hopper::progress();
}
inline void sts_int(uint32_t address, int a) { hopper::store_shared(address, a); }
inline void sts_int2(uint32_t address, int a, int b) {
  hopper::store_shared(address, make_int2(a, b));
}
inline void sts_int4(uint32_t address, int a, int b, int c, int d) {
  hopper::store_shared(address, make_int4(a, b, c, d));
}
inline void sts_float4(uint32_t address, float a, float b, float c, float d) {
  hopper::store_shared(address, make_float4(a, b, c, d));
}
inline void sts_float2(uint32_t address, float a, float b) {
  hopper::store_shared(address, float2{a, b});
}
inline void zero_chunk(uint32_t address) { sts_int4(address, 0, 0, 0, 0); }
inline int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
inline int thread_again() { return hopper::self->index; }

}  // namespace magi
