// SPDX-License-Identifier: Apache-2.0
// What tests ask of the device beside launches; for the one source of a library for the CPU.
#pragma once

#include "ffa/common/host.h"

extern "C" {
void use_device(int multiprocessors, uint64_t seed) {
  hopper::device.multiprocessors = multiprocessors;
  hopper::device.seed = seed;
}
// What kernels did wrong since; NULL if nothing.
const char* synchronize() {
  return hopper::error_of([] { hopper::device.stream.synchronize(); });
}
const char* last_error() { return magi::error_buffer(); }
}
