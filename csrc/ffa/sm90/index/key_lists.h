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

// Rows of keys or values: where that of key 0 and head 0 is, the way to the next of each in bytes,
// and how many times 16 bytes a row has.
struct GatheredTensor {
  const uint8_t* rows;
  int64_t token_bytes, head_bytes;
  int32_t chunks;
};

inline GatheredTensor gathered_tensor(const void* rows, int64_t stride_token, int64_t stride_head,
                                      int32_t head_dim) {
  return {static_cast<const uint8_t*>(rows), 2 * stride_token, 2 * stride_head, head_dim / 8};
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

  // The key at this place; -1 behind the last.
  __device__ __forceinline__ int key(int place) const {
    if (place >= count) return -1;
    if (k_block == 1) return start + __ldg(entries + place);
    const int entry = place / k_block;
    return start + __ldg(entries + entry) * k_block + place - entry * k_block;
  }
};

}  // namespace magi
