// SPDX-License-Identifier: Apache-2.0
// Positions in rings of stages in shared memory.
#pragma once

#include <cstdint>

namespace magi {

// Position in a ring of kStages stages; `phase` is the parity a reader waits for.
template <int kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace magi
