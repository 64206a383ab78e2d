// SPDX-License-Identifier: Apache-2.0
// Lists of keys in memory, and the keys that they name.
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

// One list.
struct KeyList {
  const int32_t* entries;
  int32_t count, start, k_block;

  __device__ KeyList(const KeyLists& k, int number)
      : entries(k.lists + static_cast<int64_t>(number) * k.max_entries),
        count(__ldg(k.key_counts + number)),
        start(k.k_starts != nullptr ? __ldg(k.k_starts + number / k.heads_kv) : 0),
        k_block(k.k_block) {}

  // The key at this place; -1 behind the last.
  __device__ __forceinline__ int key(int place) const {
    if (place >= count) return -1;
    if (k_block == 1) return start + __ldg(entries + place);
    const int entry = place / k_block;
    return start + __ldg(entries + entry) * k_block + place - entry * k_block;
  }
};

}  // namespace magi
