// SPDX-License-Identifier: Apache-2.0
// Which of two configurations a GPU runs, by the shared memory that a CTA may have.
#pragma once

#include <type_traits>

#include "ffa/common/host.h"

namespace magi::portable {

// Whether the current device runs what is made for 99 KB, or magi_ffa_use_small_tiles asked for it.
magi_status is_small(bool* small);

template <typename Run>
magi_status with_budget(Run run) {
  bool small = false;
  MAGI_RETURN(is_small(&small));
  return small ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace magi::portable
