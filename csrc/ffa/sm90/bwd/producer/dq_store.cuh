// SPDX-License-Identifier: Apache-2.0
// Stores dq that passes through shared memory: in semaphore order
// (bwd/schedule/semaphore_targets.cuh) or after the first writer, by two lanes or one; or, in
// m-blocks of 80 or 128, as it comes. The first of these lanes also asks for the keys of each work
// tile.
#pragma once

#include "device/tma.cuh"
#include "device/atomics.cuh"
#include "ffa/sm90/bwd/producer.cuh"

namespace magi {

// With MAGI_DQ_FIRST_WRITER: in a block's counter, that somebody is about to store and nothing is
// there yet. Less than any count, so the last kernel waits on.
constexpr int kClaimed = -(1 << 30);

// Whether the dq at hand is the first of its block and is to be stored, where the first writer
// does; waits until there is something to add to. That takes no longer than a store: who has
// claimed a block has its dq at hand. `seen`: the counter, at some time.
__device__ __forceinline__ bool try_claim_first_store(int32_t* count, int seen) {
  if (seen == 0) {
    seen = swap_if_equal(count, 0, kClaimed);
    if (seen == 0) return true;
  }
  while (seen == kClaimed) seen = load_relaxed(count);
  return false;
}

// Sends share `fragment` of a step's dq, as many as smem has at a time, on its way to block
// `number` of dq_accum, of all columns.
template <typename C>
__device__ __forceinline__ void send_dq(const BwdKernelParams& p, uint32_t number,
                                        uint32_t fragment, uint32_t staged, bool is_first) {
  constexpr uint32_t kBytes = C::kGroups / C::kDqFragments * C::kDqBytes;
  float* to = p.dq_accum + number * static_cast<uint64_t>(C::kAtoms * dq_block_floats(C::kBlockM)) +
              fragment * (kBytes / 4);
  if (is_first)
    store_bytes(to, staged, kBytes);  // so that nothing needs to be cleared
  else
    add_bulk_float(to, staged, kBytes);
  store_commit();
}

// Waits for a share of dq of the step at this place.
template <typename C>
__device__ __forceinline__ void wait_for_dq(const BwdSmem<C>& smem, uint32_t fragment,
                                            uint32_t slot) {
  if constexpr (C::kDqFragments == 1)
    mbar_wait(smem.dq_full(slot % C::kDqStoreLanes), slot / C::kDqStoreLanes);
  else
    mbar_wait(smem.dq_full(fragment), slot & 1);
}

// All shares of a step may be overwritten.
template <typename C>
__device__ __forceinline__ void release_dq(const BwdSmem<C>& smem) {
#pragma unroll 1
  for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment)
    mbar_arrive(smem.dq_empty(fragment));
}

// The dq of a step, when it is there and its semaphore target has come, which is `*target_at`: one
// lane, while another may add the step behind. `number` says which block of dq_accum, of all
// columns; `slot` is its stage of dq_queue. Where smem has room for the fragment of one warpgroup
// only, the second fragment follows the first.
//
// What a complete bulk copy wrote would be seen by the thread that waited for it; it need not have
// got to the place in L2 where the next tile adds. Without a release some additions come before the
// one that they should follow, and some are lost to the store of the first
// (docs/design/determinism.md). Who waits needs no acquire: it reads nothing, its addition is
// made in L2, and is not asked for before the count has been seen.
template <typename C>
__device__ __forceinline__ void add_at_semaphore(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                                 uint32_t number, const int32_t* target_at,
                                                 uint32_t slot) {
  int32_t* count = p.dq_semaphore + number;
  const int target = p.first_writer ? 0 : *target_at;
  int seen = load_relaxed(count);
  bool is_first = false;
#pragma unroll 1
  for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment) {
    wait_for_dq<C>(smem, fragment, slot);
    if (fragment == 0) {
      while (seen < target) seen = load_relaxed(count);
      is_first = p.first_writer ? try_claim_first_store(count, seen) : seen == 0;
    }
    send_dq<C>(p, number, fragment, smem.dq(), is_first);
    store_wait_read();
    mbar_arrive(smem.dq_empty(fragment));
  }
  store_wait_all();
  add_released(count, p.first_writer && is_first ? 1 - kClaimed : 1);
}

// Writes the dq of a step that is the only contribution of its block, rounded rows of all columns;
// rows and columns that do not exist are left out. Nobody waits for it but the end of the kernel.
template <typename C>
__device__ __forceinline__ void store_direct(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                             uint32_t number, uint32_t slot) {
  const uint32_t head = number / static_cast<uint32_t>(p.num_m_blocks);
  const int query = (number - head * p.num_m_blocks) * C::kBlockM;
#pragma unroll 1
  for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment)
    wait_for_dq<C>(smem, fragment, slot);
#pragma unroll
  for (int d = 0; d < C::kAtoms; ++d)
    store_tile_3d(&p.dq_map, smem.dq() + d * (C::kBlockM * 128), d * 64, query, head);
  store_commit();
  store_wait_read();
  release_dq(smem);
}

// Whether one lane adds all steps. It does where a tile contributes to a block in several segments:
// all its contributions have the same semaphore target, and only one lane adds them one by one.
template <typename C>
__device__ __forceinline__ bool stores_alone(const BwdKernelParams& p) {
  return C::kDqStoreLanes == 1 || (!p.first_writer && !(p.order[0] & (kTimed | kInWaves)));
}

// Adds dq of the steps of a work tile, by two lanes each of which takes every second one, counted
// from the start of the CTA, `kWho` 0 or 1 being the number of the first; or by one. An addition
// takes a lane longer than a step takes the warpgroups, mostly until it is complete and passed on.
// Each lane looks at all steps, to know which is the last of the work tile. A step's entry in
// dq_queue is overwritten kDqQueueStages steps later, when Q of the step kStages before that one
// has been used; by then the lanes have taken dq of all steps before, so they have read the entry.
template <typename C, int kWho>
__device__ __forceinline__ void store_every_second(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                                   uint32_t work_stage,
                                                   Ring<C::kDqQueueStages>& ring) {
  bool ends;
#pragma unroll 1
  do {
    mbar_wait(smem.step_full(ring.stage), ring.phase);
    const uint32_t dq_queue = lds_int(smem.dq_queue(ring.stage)),
                   number = dq_queue &
                            ~(C::kDirectStore ? kLastFragments | kDirectFragments : kLastFragments);
    ends = dq_queue & kLastFragments;
    const bool is_mine = ring.stage % 2 == kWho || (kWho == 0 && stores_alone<C>(p));
    if (C::kPasses > 1 && !makes_dq<C>(lds_int(smem.work_tile(work_stage) + 12))) {
      // Nothing to add, but the warpgroups keep no more than a step ahead of this lane.
#pragma unroll 1
      for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment)
        wait_for_dq<C>(smem, fragment, ring.stage);
      release_dq(smem);
    } else if (C::kDirectStore && is_mine && dq_queue & kDirectFragments) {
      store_direct<C>(p, smem, number, ring.stage);
    } else if (is_mine) {
      const int64_t block = number % static_cast<uint32_t>(p.num_m_blocks);
      const int32_t* target_at = p.semaphore_targets + block * p.targets_per_block;
      if (is_split_in_order<C>(p))  // that of its part of the heads
        target_at += lds_int(smem.work_tile(work_stage)) * p.work_tiles_per_tile +
                     (number / static_cast<uint32_t>(p.num_m_blocks) >> p.heads_shift);
      else
        target_at += lds_int(smem.work_semaphore(work_stage));
      add_at_semaphore<C>(p, smem, number, target_at, ring.stage);
    }
    ring.advance();
  } while (!ends);
}

// One lane, the second that adds.
template <typename C>
__device__ void store_dq(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
  Ring<C::kDqQueueStages> ring;
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    if (work_tile.z > 0 && !stores_alone<C>(p))
      store_every_second<C, 1>(p, smem, state.work_stage(), ring);
    mbar_arrive(smem.issued());
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
  if constexpr (C::kDirectStore) store_wait_all();  // of what was written and not added
}

// The same in no order, where steps are wide: each warpgroup's share when it is there. `phase`: of
// the shares. With a work list all of them have been added at the end, and nothing that comes
// behind can overtake that (docs/design/determinism.md).
template <typename C>
__device__ __forceinline__ void store_fragments(const BwdKernelParams& p, const BwdSmem<C>& smem,
                                                uint32_t& phase) {
  uint32_t number;
#pragma unroll 1
  do {
#pragma unroll 1
    for (uint32_t fragment = 0; fragment < C::kDqFragments; ++fragment) {
      mbar_wait(smem.dq_full(fragment), phase);
      number = lds_int(smem.dq_number(fragment));
      add_bulk_float(p.dq_accum + static_cast<uint64_t>(number & ~kLastFragments) *
                                      dq_block_floats(C::kRowBlockM),
                     smem.dq() + fragment * C::kDqBytes, C::kDqBytes);
      store_commit();
    }
    phase ^= 1;
    store_wait_read();
    mbar_arrive(smem.dq_empty(0));
    mbar_arrive(smem.dq_empty(1));
  } while (!(number & kLastFragments));
  if (C::kWorkList && p.work_list != nullptr) {
    store_wait_all();
    fence_proxies();
    __threadfence();
  }
}

// One lane. Copies K and V of each work tile, and adds the dq of each step where that leaves by way
// of shared memory.
template <typename C>
__device__ void copy_keys_store_dq(const BwdKernelParams& p, const BwdSmem<C>& smem) {
  PipelineState state;
  Ring<C::kDqQueueStages> ring;
  uint32_t dq_phase = 0;
  while (true) {
    mbar_wait(smem.work_full(state.work_stage()), state.work_phase());
    const int4 work_tile = lds_int4(smem.work_tile(state.work_stage()));
    if (work_tile.x < 0) break;
    mbar_wait(smem.kv_empty(), state.kv_phase() ^ 1);
    if (work_tile.z == 0) {
      mbar_arrive(smem.kv_raw());  // nothing to load, but dk and dv are staged there
    } else {
      load_keys<C>(p, smem, smem.work_tile(state.work_stage()));
      if constexpr (C::kSemaphored)
        store_every_second<C, 0>(p, smem, state.work_stage(), ring);
      else if constexpr (C::kIsWide)
        store_fragments<C>(p, smem, dq_phase);
    }
    if constexpr (C::kSemaphored) mbar_arrive(smem.issued());
    mbar_arrive(smem.work_empty(state.work_stage()));
    state.next_work();
  }
  if constexpr (!C::kDirectDq) store_wait_all();
}

}  // namespace magi
