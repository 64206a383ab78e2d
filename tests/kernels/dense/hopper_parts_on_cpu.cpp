// SPDX-License-Identifier: Apache-2.0
// Small kernels for the CPU that show which mistakes of a kernel the emulator finds.
#include "ffa/common/host.cu"
#include "ffa/common/scores.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "ffa/sm90/wgmma.cuh"

namespace magi {

// How a product of one warpgroup is made, out = a b^T + a b^T; all are (64, 64).
struct ProductParams {
  CUtensorMap a, b, out;
  const uint16_t* rows;  // of a, for copies by threads
  int a_major, b_major, from_registers;
  int mistake;  // which one the kernel makes; 0: none
};

// Where things are in shared memory.
constexpr uint32_t kTileA = 0, kTileB = 64 << 10, kTileOut = 160 << 10, kBarrier = 220 << 10;
constexpr uint32_t kProductSmem = kBarrier + 64;

// A and B may lie transposed.
void product(const ProductParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t smem = smem_addr(raw), bar = smem + kBarrier;
  const auto is = [&](int mistake) { return p.mistake == mistake; };
  if (threadIdx.x == 0 && !is(7)) {
    mbar_init(bar, 1);
    if (!is(10)) mbar_init_fence();
  }
  __syncthreads();
  // Both tiles are loaded by a thread of another warp.
  constexpr uint32_t kTileBytes = 64 * 128;
  if (threadIdx.x == 32) {
    mbar_expect(bar, 2 * kTileBytes + (is(3) ? 16 : 0));
    if (is(8)) mbar_arrive(bar);
    load_tile_3d(smem + kTileA, &p.a, bar, 0, 0, 0, kEvictFirst);
    load_tile_3d(smem + kTileB, &p.b, bar, 0, 0, 0, kEvictLast);
  }
  if (!is(20)) mbar_wait(bar, 0);
  if (!is(11)) __syncwarp();
  float d[32];
  uint32_t registers[4][4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8,
                column = 16 * step + lane % 4 * 2 + i / 2 * 8;
      std::memcpy(&registers[step][i], p.rows + 64 * row + column, 4);
    }
  for (int round = 0; round < 2; ++round) {
    if (!is(5) && !(is(13) && round == 1)) wgmma_fence();
    for (int step = 0; step < 4; ++step) {
      const uint64_t a =
          operand(operand_low(smem + kTileA, kTileBytes), p.a_major ? step * 128 : step * 2);
      const uint64_t b =
          operand(operand_low(smem + kTileB, kTileBytes), p.b_major ? step * 128 : step * 2);
      const int keep = round + step > 0;
      using Rows = Wgmma<bf16, 64, 0>;
      using Columns = Wgmma<bf16, 64, 1>;
      if (p.from_registers)
        p.b_major ? Columns::rs(d, registers[step], b, keep)
                  : Rows::rs(d, registers[step], b, keep);
      else if (p.a_major)
        p.b_major ? Columns::ss<1>(d, a, b, keep) : Rows::ss<1>(d, a, b, keep);
      else
        p.b_major ? Columns::ss(d, a, b, keep) : Rows::ss(d, a, b, keep);
    }
    wgmma_commit();
    if (is(13) && round == 0) {
      wgmma_wait<0>();
      wgmma_fence();
      registers[0][0] ^= 1;
    }
  }
  if (is(6)) registers[3][0] ^= 1;
  if (!is(2)) wgmma_wait<0>();
  keep_in_place(d);
  const int matrix = lane / 8, row = 16 * warp + (matrix & 1) * 8 + lane % 8;
  for (int j = 0; j < 8; j += 2) {
    const int chunk = j + (matrix >> 1);
    const uint32_t at = smem + kTileOut + row * 128 + ((chunk ^ (row & 7)) << 4);
    store_matrix_x4(
        at, pack_pair<bf16>(d[4 * j], d[4 * j + 1]), pack_pair<bf16>(d[4 * j + 2], d[4 * j + 3]),
        pack_pair<bf16>(d[4 * j + 4], d[4 * j + 5]), pack_pair<bf16>(d[4 * j + 6], d[4 * j + 7]));
  }
  if (!is(1)) fence_async_proxy();
  if (!is(21) && !(is(9) && threadIdx.x >= 124)) named_barrier(1, is(9) ? 96 : 128);
  if (threadIdx.x == 0) {
    store_tile_3d(&p.out, smem + kTileOut, 0, 0, 0);
    store_commit();
    if (!is(4)) store_wait_all();
    if (is(12)) load_bytes(smem, p.rows, 1024, bar);
  }
}

void run_product(const void* a, const void* b, void* out, int a_major, int b_major, int registers,
                 int mistake, uint64_t seed) {
  ProductParams p{};
  const auto encode = [](CUtensorMap* map, const void* at, const char* name) {
    encode_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, at, {64, 64, 1}, {128, 64 * 128}, {64, 64, 1},
               name);
  };
  encode(&p.a, a, "a");
  encode(&p.b, b, "b");
  encode(&p.out, out, "out");
  p.a_major = a_major;
  p.b_major = b_major;
  p.from_registers = registers;
  p.mistake = mistake;
  p.rows = static_cast<const uint16_t*>(a);
  hopper::run_grid(1, 128, kProductSmem, product, p, seed);
}

struct PairParams {
  int32_t *value, *seen;
  int waits;
};

// Lets the next kernel begin, and writes later.
void write_late(const PairParams p) {
  start_next_kernel();
  for (int i = 0; i < 20; ++i) __syncthreads();
  if (threadIdx.x == 0) *p.value = 1;
}

void read_early(const PairParams p) {
  if (p.waits) wait_for_kernel_before();
  __syncthreads();
  if (threadIdx.x == 0) p.seen[blockIdx.x] = *p.value;
}

}  // namespace magi

extern "C" const char* run_pair(int32_t* value, int32_t* seen, int waits, uint64_t seed) {
  return hopper::error_of([=] {
    const magi::PairParams p{value, seen, waits};
    hopper::Stream stream;
    stream.launch({1, 64, 0, [=] { magi::write_late(p); }, seed, 1, false});
    stream.launch({4, 64, 0, [=] { magi::read_early(p); }, seed, 2, true});
    stream.synchronize();
  });
}

extern "C" const char* multiply(const void* a, const void* b, void* out, int a_major, int b_major,
                                int registers, int mistake, uint64_t seed) {
  return hopper::error_of(
      [=] { magi::run_product(a, b, out, a_major, b_major, registers, mistake, seed); });
}
