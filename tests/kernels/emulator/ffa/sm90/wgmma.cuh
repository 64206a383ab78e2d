// SPDX-License-Identifier: Apache-2.0
// csrc/ffa/sm90/wgmma.cuh for the CPU. The quarter of a multiplication that belongs to a warp reads
// shared memory and adds at a random time between the instruction and the wait for it, after the
// ones before of that warp; its accumulators are NaN meanwhile.
#pragma once

#include "device/types.cuh"
#include "ffa/sm90/operand.cuh"
#include "device/tma.cuh"

namespace hopper {

// Accumulators of a warp that multiplications under way add to: 16 rows of n.
struct AccumulatorTile {
  int n;
  std::vector<float> values;
};

struct Mma {
  uint64_t a = 0, b = 0;
  bool from_registers = false, keep = false, a_transposed = false, b_transposed = false;
  int n = 0, lanes = 0, warp_of_group = 0;
  std::shared_ptr<AccumulatorTile> tile;
  float* d[32];
  const uint32_t* a_at[32];
  uint32_t a_values[32][4];
  void (*multiply)(const Mma&) = nullptr;

  bool same(const Mma& o) const {
    return a == o.a && b == o.b && from_registers == o.from_registers && keep == o.keep &&
           a_transposed == o.a_transposed && b_transposed == o.b_transposed && n == o.n &&
           multiply == o.multiply;
  }
};

// Value i of a lane: where it is in the rows of a warp.
inline int row_of_value(int lane, int i) { return lane / 4 + (i & 2) * 4; }
inline int column_of_value(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + (i & 1); }

template <typename T>
void to_floats(const uint8_t* from, float* to) {
  T values[8];
  std::memcpy(values, from, 16);
  for (int i = 0; i < 8; ++i) to[i] = values[i];
}

// `rows` x 16 values of an operand from row `first` on; `out(row, k)` is where a value belongs.
// Stored K-major, rows of 16 k follow one another at 128 bytes, 8 of them at the stride of the
// descriptor; else rows of k, with 64 of the other index, whose next 64 are a column group on.
template <typename T, typename Out>
void read_operand(uint64_t descriptor, bool transposed, int first, int rows, Out out) {
  const uint32_t start = (descriptor & 0x3fff) << 4, column_group = (descriptor >> 16 & 0x3fff)
                                                                    << 4;
  const uint32_t eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fault("An operand without the 128-byte swizzle");
  float values[8];
  const auto chunk = [&](uint32_t address) {
    check_fenced(swizzled(address), "wgmma");
    to_floats<T>(shared_at(swizzled(address), 16, "wgmma"), values);
  };
  for (int r = 0; !transposed && r < rows; ++r) {
    for (int k = 0; k < 16; k += 8) {
      const int row = first + r;
      chunk(start + row / 8 * eight_rows + row % 8 * 128 + 2 * k);
      for (int i = 0; i < 8; ++i) *out(r, k + i) = values[i];
    }
  }
  for (int k = 0; transposed && k < 16; ++k) {
    for (int r = 0; r < rows; r += 8) {
      const int row = first + r;
      chunk(start + row / 64 * column_group + k / 8 * eight_rows + k % 8 * 128 + row % 64 * 2);
      for (int i = 0; i < 8; ++i) *out(r + i, k) = values[i];
    }
  }
}

template <typename T, int kN>
void multiply_warp(const Mma& m) {
  float a[16][16], b[16][kN];
  if (m.from_registers) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {
        const uint16_t bits = static_cast<uint16_t>(m.a_values[lane][i / 2] >> 16 * (i % 2));
        T value;
        std::memcpy(&value, &bits, 2);
        a[row_of_value(lane, i)][column_of_value(lane, i)] = value;
      }
  } else {
    read_operand<T>(m.a, m.a_transposed, 16 * m.warp_of_group, 16,
                    [&](int row, int k) { return &a[row][k]; });
  }
  read_operand<T>(m.b, m.b_transposed, 0, kN, [&](int row, int k) { return &b[k][row]; });
  float* tile = m.tile->values.data();
  if (!m.keep) std::memset(tile, 0, sizeof(float) * 16 * kN);
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; ++k) {
      const float x = a[r][k];
      for (int c = 0; c < kN; ++c) tile[r * kN + c] += x * b[k][c];
    }
}

// The next multiplication of a warp.
inline void multiply_next(Warp* warp, int first_thread) {
  const std::shared_ptr<Mma> m = warp->queue.front();
  for (int lane = 0; lane < 32 && m->from_registers; ++lane)
    if (std::memcmp(m->a_at[lane], m->a_values[lane], 16) != 0)
      fault(text("Thread %d changes registers of A before the multiplication has been waited for",
                 first_thread + lane));
  m->multiply(*m);
  for (int lane = 0; lane < 32; ++lane) {
    auto& under_way = cta->threads[first_thread + lane]->accumulating;
    const auto mine = std::find_if(under_way.begin(), under_way.end(),
                                   [&](const Accumulating& x) { return x.d == m->d[lane]; });
    if (--mine->multiplications > 0) continue;
    for (int i = 0; i < m->n / 2; ++i)
      m->d[lane][i] = m->tile->values[row_of_value(lane, i) * m->n + column_of_value(lane, i)];
    under_way.erase(mine);
  }
  warp->queue.pop_front();
  ++warp->first_queued;
  wake(warp->multiplied);
}

// That nothing was written to them since the last wgmma_fence, if they are known.
inline void check_operand(const uint32_t* registers) {
  for (const KnownOperand& known : self->operands) {
    if (known.at != registers) continue;
    if (std::memcmp(known.values, registers, 16) != 0)
      fault("wgmma without a wgmma_fence since registers of A were written");
    return;
  }
  self->operands.push_back({registers, {}});
  std::memcpy(self->operands.back().values, registers, 16);
}

// One lane comes to its next multiplication; the last of the warp starts it.
inline void issue(float* d, const Mma& mine, const uint32_t* a_registers) {
  maybe_yield();
  Warp* warp = self->warp;
  const int lane = self->index % 32;
  check_together("wgmma");
  const size_t at = self->issued++ - warp->first_queued;
  if (at == warp->queue.size()) warp->queue.push_back(std::make_shared<Mma>(mine));
  Mma& m = *warp->queue[at];
  if (!m.same(mine)) fault("Lanes of a warp come to different wgmma");
  auto& under_way = self->accumulating;
  auto known = std::find_if(under_way.begin(), under_way.end(),
                            [&](const Accumulating& x) { return x.d == d; });
  if (m.tile == nullptr)
    m.tile = known != under_way.end() ? known->tile
                                      : std::make_shared<AccumulatorTile>(AccumulatorTile{
                                            m.n, std::vector<float>(16 * m.n, NAN)});
  if (!self->wgmma_fenced && (m.from_registers || known == under_way.end()))
    fault("wgmma without a wgmma_fence since the thread could touch its registers");
  if (known == under_way.end()) {
    under_way.push_back({d, m.tile, 0});
    known = under_way.end() - 1;
    for (int i = 0; i < m.n / 2; ++i) {
      m.tile->values[row_of_value(lane, i) * m.n + column_of_value(lane, i)] = d[i];
      d[i] = NAN;
    }
  }
  if (known->tile != m.tile || m.tile->n != m.n)
    fault("wgmma adds to registers of another that is under way");
  ++known->multiplications;
  m.d[lane] = d;
  if (m.from_registers) {
    check_operand(a_registers);
    m.a_at[lane] = a_registers;
    std::memcpy(m.a_values[lane], a_registers, 16);
  }
  if (++m.lanes < 32) return;
  const int first_thread = self->index - lane;
  later(Kind::kMultiply, [=] { multiply_next(warp, first_thread); });
}

}  // namespace hopper

namespace magi {

inline void wgmma_fence() {
  hopper::self->wgmma_fenced = true;
  for (auto& known : hopper::self->operands) std::memcpy(known.values, known.at, 16);
}
inline void wgmma_commit() { hopper::self->commits.push_back(hopper::self->issued); }
template <int kPending>
void wgmma_wait() {
  const auto& commits = hopper::self->commits;
  const int64_t done = commits.size() > kPending ? commits[commits.size() - 1 - kPending] : 0;
  hopper::Warp* warp = hopper::self->warp;
  hopper::self->wgmma_fenced = false;
  hopper::wait_until(
      warp->multiplied, [=] { return warp->first_queued >= done; }, "wgmma.wait_group");
}

template <int kCount>
inline void keep_in_place(float (&d)[kCount]) {
  asm volatile("" : "+m"(d)::"memory");
}

template <typename T, int kN, int kBMajor>
struct Wgmma {
  template <int kAMajor = 0>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int keep) {
    hopper::Mma m = common(b, keep);
    m.a = a;
    m.a_transposed = kAMajor != 0;
    hopper::issue(d, m, nullptr);
  }
  static void rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int keep) {
    hopper::Mma m = common(b, keep);
    m.from_registers = true;
    hopper::issue(d, m, a);
  }

 private:
  static hopper::Mma common(uint64_t b, int keep) {
    hopper::Mma m;
    m.b = b;
    m.keep = keep != 0;
    m.b_transposed = kBMajor != 0;
    m.n = kN;
    m.warp_of_group = hopper::self->index / 32 % 4;
    m.multiply = hopper::multiply_warp<T, kN>;
    return m;
  }
};

}  // namespace magi
