// SPDX-License-Identifier: Apache-2.0
// Element types of the operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace magi {

using bf16 = __nv_bfloat16;
using fp16 = __half;

}  // namespace magi
