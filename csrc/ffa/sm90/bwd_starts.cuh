// SPDX-License-Identifier: Apache-2.0
// When units are expected to start where dq is summed in order (bwd_turns.cuh): how they are handed out, simulated by one warp ahead of
// the backward. Without other headers than that of the constants, so that tests compile it for the CPU.
#pragma once

#include "bwd_config.h"

namespace magi {

// A section of heads, in ticks of one head.
struct HandOut {
  int tiles, per_tile;  // units of each tile: one for each head unit
  int places;           // CTAs
  int late;             // by which units of a tile that begin first are behind those of the tile before
  int ends_after;       // in addition to its blocks, what a unit takes
  int scale;            // by which starts are multiplied
  bool has_second;      // a section behind it, of units that are all behind the first in each place
};

// One warp. `costs` are blocks of each tile, in the order in which they are taken up; `starts` by unit, of the second section behind the first.
__device__ __forceinline__ void expect_starts(const HandOut& h, const int32_t* costs, int32_t* starts) {
  // Each lane keeps the ends of what some CTAs are at, the first one in front. Those that end together take up units together: mostly the
  // heads of a tile, so it takes about as many rounds as there are tiles.
  constexpr int kPlaces = kMaxWave / 32;
  const int lane = threadIdx.x, units = h.tiles * h.per_tile, places = h.places < units ? h.places : units;
  unsigned ends[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) ends[i] = 0;
  auto replace_first = [&](unsigned end) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const unsigned behind = i + 1 < kPlaces ? ends[i + 1] : ~0u;
      ends[i] = end < behind ? end : behind;
      end = end < behind ? behind : end;
    }
  };
  auto begin = [&](int unit, int rank, unsigned start) {
    starts[unit] = start * h.scale;
    replace_first(start + kTicks * costs[rank] + h.ends_after);
  };
  for (int unit = lane; unit < 32 * kPlaces; unit += 32) {
    if (unit < places)
      begin(unit, unit / h.per_tile, unit / h.per_tile * h.late);
    else
      replace_first(~0u);
  }
  const int all = h.has_second ? 2 * units : units;
  for (int unit = places; unit < all;) {
    const unsigned first = __reduce_min_sync(0xffffffff, ends[0]);
    const unsigned together = __ballot_sync(0xffffffff, ends[0] == first);
    const int mine = unit + __popc(together & ((1u << lane) - 1));
    if (ends[0] == first && mine < all) begin(mine, (mine < units ? mine : mine - units) / h.per_tile, first);
    unit += __popc(together);
  }
}

}  // namespace magi
