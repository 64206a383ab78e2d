// SPDX-License-Identifier: Apache-2.0
// Rows of MLA's latents that lie anywhere, 64 at a time, brought to shared memory in the layout
// that a copy by tensor map with 128-byte swizzle leaves: by the threads of a producer warpgroup.
#pragma once

#include "device/async_copy.cuh"
#include "device/mbarrier.cuh"
#include "ffa/sm90/index/key_lists.h"

namespace magi {

// Eight lanes bring 128 bytes of a row, so a warp has four rows at a time and 16 of a block. A lane
// keeps the keys of its four rows while the columns come in parts.
struct LatentGather {
  static constexpr int kRows = 64, kOfLane = 4;
  static constexpr int kAtomBytes = kRows * 128;  // of 64 columns

  const KeyList& list;
  const GatheredTensor& tensor;
  const int row, piece;     // the first of this lane's rows, and which 16 bytes of 128
  int first = 0;            // place of the block in the list
  int entries[kOfLane];     // of the block that comes next
  uint32_t units[kOfLane];  // where rows begin, in 16 bytes
  const uint8_t* head;      // row 0 of the kv head
  uint32_t exist;           // bit i: row i of the lane has a key
  uint32_t to;              // where this lane's piece of its first row lies in an atom

  __device__ LatentGather(const KeyList& l, const GatheredTensor& t, int thread)
      : list(l), tensor(t), row(thread / 8), piece(thread % 8) {
    static_assert(128 / 8 * kOfLane == kRows && 128 / 8 % 8 == 0, "rows of a lane swizzle alike");
    to = row * 128 + ((piece ^ row % 8) * 16);
    ask();
  }

  __device__ __forceinline__ int place(int i) const { return first + row + kRows / kOfLane * i; }
  __device__ __forceinline__ bool is_over() const { return first >= list.count; }
  __device__ __forceinline__ void ask() {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) entries[i] = list.entry(place(i));
  }

  // The keys of a block are the next ones to be loaded, and those behind them are asked for.
  __device__ __forceinline__ void next_block(int kv_head) {
    exist = 0;
    head = tensor.rows + kv_head * tensor.head_bytes;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int key = list.key_of(entries[i], place(i));
      if (key >= 0) exist |= 1u << i;
      units[i] = key >= 0 ? key * tensor.token_units : 0;
    }
    first += kRows;
    ask();
  }

  // All parts of a block of C, each once its room is empty: `empty(part)` and `full(part)` are its
  // barriers.
  template <typename C, int kPart = 0, typename Empty, typename Full>
  __device__ __forceinline__ void load_parts(uint32_t slot, uint32_t phase, const Empty& empty,
                                             const Full& full) const {
    mbar_wait(empty(kPart), phase ^ 1);
    load<C::part_begin(kPart), C::part_end(kPart)>(slot);
    async_copies_arrive(full(kPart));
    if constexpr (kPart + 1 < C::kParts) load_parts<C, kPart + 1>(slot, phase, empty, full);
  }

  // Starts the copies of atoms of 64 columns of the block. Where rows have all of these columns,
  // addresses are a sum with a constant each: a producer that computes them is behind the tensor
  // cores.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load(uint32_t slot) const {
    if (tensor.chunks >= 8 * kEnd) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
#pragma unroll
        for (int atom = kFirst; atom < kEnd; ++atom)
          async_copy_16_or_zero(slot + to + i * (kAtomBytes / kOfLane) + atom * kAtomBytes,
                                head + 16ull * (units[i] + piece) + atom * 128, exist >> i & 1);
      }
    } else {
#pragma unroll 1
      for (int atom = kFirst; atom < kEnd; ++atom) load_atom(slot, atom);
    }
  }

  // One atom; zeros where there is no key, and behind the end of a row.
  __device__ __forceinline__ void load_atom(uint32_t slot, int atom) const {
    const int chunk = atom * 8 + piece;
    const bool inside = chunk < tensor.chunks;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      async_copy_16_or_zero(slot + to + i * (kAtomBytes / kOfLane) + atom * kAtomBytes,
                            head + 16ull * (units[i] + (inside ? chunk : 0)),
                            inside && (exist >> i & 1));
  }
};

}  // namespace magi
