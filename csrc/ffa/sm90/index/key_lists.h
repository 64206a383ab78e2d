// SPDX-License-Identifier: Apache-2.0
// Lists of keys in memory, the keys that they name, and where the rows of these lie.
#pragma once

#include <cstdint>

namespace magi {

struct KeyLists {
  const int32_t* lists;       // (lists, heads_kv, max_entries)
  const int32_t* key_counts;  // (lists, heads_kv)
  const int32_t* k_starts;    // (lists,) or NULL
  int32_t heads_kv, max_entries, k_block;

  __host__ __device__ int64_t max_keys() const {
    return static_cast<int64_t>(max_entries) * k_block;
  }
};

// Those that the parameters of a call name.
template <typename Params>
KeyLists key_lists(const Params& a) {
  return {a.lists, a.key_counts, a.k_starts, a.heads_kv, a.max_entries, a.k_block};
}

// Rows of keys or values: where that of key 0 and head 0 is, the way to the next head in bytes and
// to the next key in units of 16 bytes, and how many of these a row has. The units from the first
// key to the last fit 32 bits.
struct GatheredTensor {
  const uint8_t* rows;
  int64_t head_bytes;
  uint32_t token_units;
  int32_t chunks;
};

inline GatheredTensor gathered_tensor(const void* rows, int64_t stride_token, int64_t stride_head,
                                      int32_t head_dim) {
  return {static_cast<const uint8_t*>(rows), 2 * stride_head,
          static_cast<uint32_t>(stride_token / 8), head_dim / 8};
}

// One list.
struct KeyList {
  const int32_t* entries;
  int32_t count, start, k_block;

  __device__ KeyList(const KeyLists& k, int number)
      : entries(k.lists + static_cast<int64_t>(number) * k.max_entries),
        count(__ldg(k.key_counts + number)),
        start(k.k_starts != nullptr ? __ldg(k.k_starts + number / k.heads_kv) : 0),
        k_block(k.k_block) {}

  // What the list says of this place; -1 behind the last. A load, so best asked for long before
  // `key_of` needs it.
  __device__ __forceinline__ int entry(int place) const {
    return place < count ? __ldg(entries + (k_block == 1 ? place : place / k_block)) : -1;
  }
  // The key at a place with that entry; -1 behind the last.
  __device__ __forceinline__ int key_of(int entry, int place) const {
    if (entry < 0) return -1;
    return start + (k_block == 1 ? entry : entry * k_block + place % k_block);
  }
  __device__ __forceinline__ int key(int place) const { return key_of(entry(place), place); }
};

}  // namespace magi
