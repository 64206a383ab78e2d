// SPDX-License-Identifier: Apache-2.0
// csrc/device/tma.cuh for the CPU. A load is done at a random later time, and until then its
// destination is NaN; a store reads shared memory at a random time before the wait for that, and
// writes at a random time before the other one.
#pragma once

#include <cuda.h>

#include <array>

#include "device/mbarrier.cuh"

namespace hopper {

using Coordinates = std::array<int, 5>;

// By absolute address: 16-byte chunks of 8 rows of 128 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

inline uint32_t element_bytes(const CUtensorMap& map) {
  return static_cast<uint32_t>(map.steps[0]);
}

inline uint32_t box_bytes(const CUtensorMap& map) {
  uint32_t bytes = element_bytes(map);
  for (uint32_t i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// Calls `run(offset in the box, bytes, where in memory or NULL if outside)` for every 16 bytes, or
// for each element of 16 bytes that are half outside.
template <typename Run>
void for_chunks_of_box(const CUtensorMap& map, const Coordinates& at, Run run) {
  const uint32_t element = element_bytes(map), inner = map.box[0] * element;
  const uint32_t rows = box_bytes(map) / inner;
  for (uint32_t row = 0; row < rows; ++row) {
    int64_t offset = 0;
    bool inside = true;
    uint32_t left = row;
    for (uint32_t i = 1; i < map.rank; ++i) {
      const int64_t c = at[i] + static_cast<int64_t>(left % map.box[i]);
      left /= map.box[i];
      inside &= c >= 0 && c < static_cast<int64_t>(map.sizes[i]);
      offset += c * map.steps[i];
    }
    const auto part = [&](uint32_t x, uint32_t bytes) {
      const int64_t first = at[0] + static_cast<int64_t>(x / element);
      const int64_t end = first + bytes / element, size = static_cast<int64_t>(map.sizes[0]);
      if (inside && first >= 0 && end <= size)
        return run(row * inner + x, bytes, map.base + offset + first * element), true;
      if (inside && first < size && end > 0) return false;
      return run(row * inner + x, bytes, nullptr), true;
    };
    for (uint32_t x = 0; x < inner; x += 16) {
      if (part(x, 16)) continue;
      for (uint32_t y = 0; y < 16; y += element) part(x + y, element);
    }
  }
}

inline void check_tile(uint32_t address, const CUtensorMap& map, uint32_t rank, const char* who) {
  if (map.rank != rank) fault(text("%s with a map of %u dimensions", who, map.rank));
  if (address % 128 != 0) fault(text("%s at %u, not a multiple of 128", who, address));
  shared_at(address, box_bytes(map), who);
}

inline void begin_load(uint32_t to, uint32_t bytes, uint32_t bar, const char* who) {
  mbarrier(bar);
  maybe_yield();
  ++cta->open_loads;
  begin_arrival(to, bytes, who);
}

inline void end_load(uint32_t bar, uint32_t bytes) {
  --cta->open_loads;
  complete_bytes(bar, bytes);
}

inline void load_tile(uint32_t to, const CUtensorMap& map, uint32_t bar, uint32_t rank,
                      const Coordinates& at) {
  check_tile(to, map, rank, "A tile load");
  begin_load(to, box_bytes(map), bar, "A tile load");
  later(Kind::kLoad, [=] {
    for_chunks_of_box(map, at, [&](uint32_t offset, uint32_t bytes, const uint8_t* from) {
      uint8_t* slot = shared_at(swizzled(to + offset), bytes, "A tile load");
      if (from != nullptr)
        std::memcpy(slot, from, bytes);
      else
        std::memset(slot, 0, bytes);
    });
    mark_clean(to, box_bytes(map));
    end_load(bar, box_bytes(map));
  });
}

// A bulk store of this thread in two steps: `read` gives what is to be done when it writes.
inline void begin_store(std::function<std::function<void()>()> read) {
  maybe_yield();
  const std::shared_ptr<StoreGroup> group = self->open_group;
  Thread* thread = self;
  ++group->unread;
  ++group->unwritten;
  later(Kind::kStoreRead, [=] {
    std::function<void()> write = read();
    --group->unread;
    wake(thread->own_work);
    later(Kind::kStoreWrite, [=] {
      write();
      --group->unwritten;
      wake(thread->own_work);
    });
  });
}

inline void store_tile(const CUtensorMap& map, uint32_t from, uint32_t rank,
                       const Coordinates& at) {
  check_tile(from, map, rank, "A tile store");
  begin_store([=]() -> std::function<void()> {
    std::vector<uint8_t> box(box_bytes(map));
    for (uint32_t i = 0; i < box.size(); i += 16) check_fenced(from + i, "A tile store");
    for (uint32_t i = 0; i < box.size(); i += 16)
      std::memcpy(&box[i], shared_at(swizzled(from + i), 16, "A tile store"), 16);
    return [=, kept = std::move(box)] {
      for_chunks_of_box(map, at, [&](uint32_t offset, uint32_t bytes, uint8_t* to) {
        if (to != nullptr) std::memcpy(to, &kept[offset], bytes);
      });
    };
  });
}

inline void check_bulk(uint32_t address, const void* pointer, uint32_t bytes) {
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(pointer) % 16 != 0 || bytes % 16 != 0)
    fault(text("A bulk copy of %u bytes at %u: all must be multiples of 16", bytes, address));
}

inline std::vector<uint8_t> read_bulk(uint32_t from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 16) check_fenced(from + i, "A bulk store");
  const uint8_t* at = shared_at(from, bytes, "A bulk store");
  return {at, at + bytes};
}

inline void store_bulk(void* to, uint32_t from, uint32_t bytes) {
  check_bulk(from, to, bytes);
  begin_store([=]() -> std::function<void()> {
    return [=, kept = read_bulk(from, bytes)] { std::memcpy(to, kept.data(), bytes); };
  });
}

template <int kBut, bool kRead>
void wait_for_stores() {
  auto& groups = self->groups;
  const auto done = [&] {
    for (size_t i = 0; i + kBut < groups.size(); ++i)
      if ((kRead ? groups[i]->unread : groups[i]->unwritten) != 0) return false;
    return true;
  };
  maybe_yield();
  wait_until(self->own_work, done, kRead ? "wait_group.read" : "wait_group");
  while (groups.size() > 2 && groups.front()->unwritten == 0) groups.pop_front();
}

}  // namespace hopper

namespace magi {

constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

inline void prefetch_tensor_map(const CUtensorMap*) {}

inline void load_tile_3d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                         uint64_t) {
  hopper::load_tile(dst, *map, bar, 3, {c0, c1, c2});
}

inline void load_tile_4d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                         int c3, uint64_t) {
  hopper::load_tile(dst, *map, bar, 4, {c0, c1, c2, c3});
}

inline void store_tile_4d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
  hopper::store_tile(*map, src, 4, {c0, c1, c2, c3});
}

inline void store_tile_3d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  hopper::store_tile(*map, src, 3, {c0, c1, c2});
}

inline void load_bytes(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  hopper::check_bulk(dst, src, bytes);
  hopper::begin_load(dst, bytes, bar, "A bulk load");
  hopper::later(hopper::Kind::kLoad, [=] {
    std::memcpy(hopper::shared_at(dst, bytes, "A bulk load"), src, bytes);
    hopper::mark_clean(dst, bytes);
    hopper::end_load(bar, bytes);
  });
}

inline void prefetch_bytes(const void*, uint32_t) {}

inline void store_bytes(void* dst, uint32_t src, uint32_t bytes) {
  hopper::store_bulk(dst, src, bytes);
}

inline void store_bytes(void* dst, uint32_t src, uint32_t bytes, uint64_t) {
  hopper::store_bulk(dst, src, bytes);
}

inline void add_bulk_float(float* to, uint32_t from, uint32_t bytes) {
  hopper::check_bulk(from, to, bytes);
  hopper::begin_store([=]() -> std::function<void()> {
    return [=, kept = hopper::read_bulk(from, bytes)] {
      std::vector<float> values(bytes / 4);
      std::memcpy(values.data(), kept.data(), bytes);
      for (size_t i = 0; i < values.size(); ++i) to[i] += values[i];
    };
  });
}

inline void store_commit() {
  hopper::self->groups.push_back(hopper::self->open_group);
  hopper::self->open_group = std::make_shared<hopper::StoreGroup>();
}

inline void store_wait_read() { hopper::wait_for_stores<0, true>(); }
inline void store_wait_read_but_one() { hopper::wait_for_stores<1, true>(); }
inline void store_wait_all() { hopper::wait_for_stores<0, false>(); }
inline void store_wait_but_one() { hopper::wait_for_stores<1, false>(); }

inline void fence_async_proxy() { hopper::fence(); }
inline void fence_proxies() { hopper::fence(); }

}  // namespace magi

namespace hopper {

// Lane 8i + l has the address of row l of matrix i. In register i it has values 2(lane % 4) and the
// next of row lane / 4 of matrix i, or of its column.
inline void store_matrices(uint32_t address, const uint32_t (&mine)[4], bool transposed) {
  struct Given {
    uint32_t address;
    const uint32_t* values;
  } given{address, mine};

  if (address % 16 != 0) fault(text("stmatrix to %u, not a multiple of 16", address));
  meet_in_warp(0xffffffff, Collective::kMatrix, transposed, 0, &given, [&](Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) {
      if (m.values[lane] != m.values[0]) fault("stmatrix of two kinds in a warp");
      const Given& row = *static_cast<const Given*>(m.extra[lane]);
      uint16_t values[8];
      for (int column = 0; column < 8; ++column) {
        const int r = transposed ? column : lane % 8, c = transposed ? lane % 8 : column;
        const Given& from = *static_cast<const Given*>(m.extra[4 * r + c / 2]);
        values[column] = static_cast<uint16_t>(from.values[lane / 8] >> 16 * (c % 2));
      }
      check_arrived(row.address, 16, "stmatrix");
      std::memcpy(shared_at(row.address, 16, "stmatrix"), values, 16);
      const Thread& writer = lane_of_warp(lane);
      mark_written(row.address, 16, writer);
    }
  });
}

}  // namespace hopper

namespace magi {

inline void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  hopper::store_matrices(address, {a, b, c, d}, false);
}

inline void store_matrix_transposed_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                       uint32_t d) {
  hopper::store_matrices(address, {a, b, c, d}, true);
}

}  // namespace magi
