// SPDX-License-Identifier: Apache-2.0
// Hands out the units of a kernel: one lane per CTA takes them from a counter, the heaviest first, and stages them and the
// layer records of their tiles in shared memory. A unit is a tile of the plan for one head unit, or a part of that.
#pragma once

#include <climits>
#include <cstddef>

#include "../../include/magi/abi.h"
#include "../common/barrier.cuh"
#include "../common/copy.cuh"
#include "../common/shared.cuh"

namespace magi {

constexpr int kNoPart = INT_MIN;

// Linear index of a unit, whose parts are not counted -> (rank in the cost order, head unit). Inside a section of heads the
// heaviest tiles of all its heads come first; sections follow one another so that what their CTAs read stays in L2.
template <typename P>
__device__ __forceinline__ void unit_coords(const P& p, int unit, int* rank, int* head_unit) {
  const int per_section = p.num_tiles * p.heads_per_section;
  const int section = unit / per_section;
  const int in_section = unit - section * per_section;
  const int first = section * p.heads_per_section;
  const int heads = min(p.heads_per_section, p.head_units - first);
  *rank = in_section / heads;
  *head_unit = first + in_section - *rank * heads;
}

// How far a role is, in one register: units so far in the low two bits, layers so far above. Both rings have two slots; K and
// V have one, whose phase changes with every unit.
struct Turns {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t unit_slot() const { return count & 1; }
  __device__ __forceinline__ uint32_t unit_phase() const { return count >> 1 & 1; }
  __device__ __forceinline__ uint32_t kv_phase() const { return count & 1; }
  __device__ __forceinline__ uint32_t layer_slot() const { return count >> 2 & 1; }
  __device__ __forceinline__ uint32_t layer_phase() const { return count >> 3 & 1; }
  __device__ __forceinline__ void next_unit() { count = (count & ~3u) | ((count + 1) & 3); }
  __device__ __forceinline__ void next_layer() { count += 4; }
};

// The tile of that rank. The heads that come first may take their tiles in an order of their own.
template <typename P>
__device__ __forceinline__ int tile_of(const P& p, int order_at, int first_order_at, int unit, int rank) {
  const bool is_first = first_order_at != 0 && unit < p.num_tiles * p.heads_per_section;
  return p.plan[(is_first ? first_order_at : order_at) + rank];
}

// Publishes a unit and stages the layer records of its tile; `desc` is where they begin and how many they are.
template <typename P, typename Smem>
__device__ __forceinline__ void publish_unit(const P& p, const Smem& smem, Turns& turns, int tile, int head_unit, int2 desc,
                                             int word, int records_at, int layer_words) {
  mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
  sts_int4(smem.unit(turns.unit_slot()), tile, head_unit, desc.y, word);
  mbar_arrive(smem.unit_full(turns.unit_slot()));
  turns.next_unit();
  const int32_t* record = p.plan + records_at + static_cast<int64_t>(desc.x) * layer_words;
#pragma unroll 1
  for (int left = desc.y; left > 0; --left, record += layer_words) {
    mbar_wait(smem.layer_empty(turns.layer_slot()), turns.layer_phase() ^ 1);
    mbar_expect(smem.layer_full(turns.layer_slot()), layer_words * 4);
    load_bytes(smem.layer(turns.layer_slot()), record, layer_words * 4, smem.layer_full(turns.layer_slot()));
    turns.next_layer();
  }
}

// Publishes that there is no more work.
template <typename Smem>
__device__ __forceinline__ void publish_none(const Smem& smem, const Turns& turns) {
  mbar_wait(smem.unit_empty(turns.unit_slot()), turns.unit_phase() ^ 1);
  sts_int4(smem.unit(turns.unit_slot()), -1, -1, -1, -1);
  mbar_arrive(smem.unit_full(turns.unit_slot()));
}

// The last CTA to get here, when it has taken its last unit, resets the counter for the next launch on this stream.
template <typename P>
__device__ __forceinline__ void leave_units(const P& p) {
  __threadfence();
  if (atomicInc(reinterpret_cast<unsigned*>(p.workspace) + 1, gridDim.x - 1) == gridDim.x - 1) p.workspace[0] = 0;
}

template <typename P, typename Smem>
__device__ __forceinline__ void publish_end(const P& p, const Smem& smem, const Turns& turns) {
  publish_none(smem, turns);
  leave_units(p);
}

// One lane. Hands out units two ahead and stages the layer records of each in shared memory.
//
// `part_of(where the tile's description is in the plan, index)` gives the fourth word of the unit, or kNoPart. Returns what would be published next.
template <typename P, typename Smem, typename PartOf>
__device__ __forceinline__ Turns schedule_units(const P& p, const Smem& smem, int parts, PartOf part_of) {
  // Offsets rather than pointers, to save registers.
  const int32_t* header = p.plan;
  const int32_t tiles_at = header[offsetof(magi_tile_plan_header, words_tiles) / 4];
  const int32_t order_at = header[offsetof(magi_tile_plan_header, words_order) / 4];
  const int32_t first_order_at = header[offsetof(magi_tile_plan_header, words_first_order) / 4];
  const int32_t records_at = header[offsetof(magi_tile_plan_header, words_records) / 4];
  const int32_t layer_words = header[offsetof(magi_tile_plan_header, layer_words) / 4];
  auto layers_of = [&](int tile) {  // first record, number of records
    return *reinterpret_cast<const int2*>(p.plan + tiles_at + 8 * tile + offsetof(magi_tile_desc, layer_begin) / 4);
  };
  const int total = p.num_tiles * p.head_units * parts;
  Turns turns;
  int unit = blockIdx.x;
  int next = unit < total ? atomicAdd(p.workspace, 1) + gridDim.x : total;
  int rank = 0, head_unit = 0, tile = 0;
  int2 desc = make_int2(0, 0);
  if (unit < total) {
    unit_coords(p, unit / parts, &rank, &head_unit);
    tile = tile_of(p, order_at, first_order_at, unit / parts, rank);
    desc = layers_of(tile);
  }
  while (unit < total) {
    // The look-ups of the next unit travel while this one is handed out.
    const int after = next < total ? atomicAdd(p.workspace, 1) + gridDim.x : total;
    int next_rank = 0, next_head = 0, next_tile = 0;
    if (next < total) {
      unit_coords(p, next / parts, &next_rank, &next_head);
      next_tile = tile_of(p, order_at, first_order_at, next / parts, next_rank);
    }
    const int word = part_of(tiles_at + 8 * tile, unit % parts);
    if (word != kNoPart) publish_unit(p, smem, turns, tile, head_unit, desc, word, records_at, layer_words);
    unit = next;
    next = after;
    tile = next_tile;
    head_unit = next_head;
    if (unit < total) desc = layers_of(tile);
  }
  publish_end(p, smem, turns);
  return turns;
}

}  // namespace magi
