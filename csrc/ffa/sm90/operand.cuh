// SPDX-License-Identifier: Apache-2.0
// Descriptors of operands of wgmma in shared memory.
#pragma once

#include <cstdint>

namespace magi {

// Descriptor of a shared-memory operand with 128-byte swizzle, in two words, the second of which is
// the same everywhere. The low word holds the address and the distance of 64-element column groups
// (bytes; used by MN-major operands only), the high one the distance of 8-row groups, always 1024
// bytes here.
__device__ __forceinline__ uint32_t operand_low(uint32_t address, uint32_t column_group) {
  return (address >> 4) | (column_group >> 4) << 16;
}

constexpr uint32_t kOperandHigh = (1024u >> 4) | 1u << 30;

// So many steps of 16 bytes along the operand; they are added in 64 bits, which takes one uniform
// instruction where two words take more.
__device__ __forceinline__ uint64_t operand(uint32_t low, int step) {
  return (static_cast<uint64_t>(kOperandHigh) << 32 | low) + step;
}

// The same, added in 32 bits: for loops that 64 bits, or what came with them, made slower
// (docs/log/ffa_backward_turns.md).
__device__ __forceinline__ uint64_t operand_by_words(uint32_t low, int step) {
  return static_cast<uint64_t>(kOperandHigh) << 32 | static_cast<uint32_t>(low + step);
}

}  // namespace magi
