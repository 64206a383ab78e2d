// SPDX-License-Identifier: Apache-2.0
// How C-ABI functions report a failure: a status, and a sentence for magi_last_error() of this
// thread.
#ifndef MAGI_PLANNER_STATUS_H
#define MAGI_PLANNER_STATUS_H

#include <stdarg.h>

#include "magi/abi.h"

namespace magi {

// Stores the sentence for the calling thread and returns `status`.
magi_status fail(magi_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
magi_status vfail(magi_status status, const char* format, va_list arguments)
    __attribute__((format(printf, 2, 0)));

}  // namespace magi

#endif  // MAGI_PLANNER_STATUS_H
