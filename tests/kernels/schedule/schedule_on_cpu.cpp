// SPDX-License-Identifier: Apache-2.0
// The kernels that assign semaphore targets, for the CPU, see emulator/README.md; and the
// steps of the main kernel, with what each waits for: the loops of bwd/producer.cuh and the
// look-ups of bwd/producer/{work_tiles,dq_store}.cuh, over the same functions. And in which order
// the last kernel takes up blocks of dq. And what the launcher says of a schedule
// (bwd/workspace.h).
#include <vector>

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/bwd/launch.cuh"

namespace {

using namespace magi;
constexpr int kThreads = 32;  // what is assigned does not depend on how many there are

template <int kBlockM>
__global__ void assign_targets(const BwdRowParams p) {
  const int tables = p.order[0] & kLaterTargets ? 2 : 1;
  for (int table = 0; table < tables; ++table)
    assign_semaphore_targets<kThreads, kBlockM>(p, blockIdx.x, table);
}

struct Steps {
  std::vector<int64_t> count;  // of each work tile
  std::vector<int32_t> counter, target;
  int flags = 0;
} found;

// A work tile, as publish_deterministic says it: its tile, its heads, where its targets are.
struct WorkTileOfKernel {
  int order_idx, tile, first_head, heads, target_at;
};

template <typename C>
WorkTileOfKernel work_tile_of(const BwdKernelParams& p, int number) {
  const auto& plan = *reinterpret_cast<const magi_tile_plan_header*>(p.plan);
  WorkTileOfKernel w;
  int head;
  if (is_split_in_order<C>(p)) {
    const int2 whole = whole_deterministic(p, number);
    work_tile_coords(p, whole.x, &w.order_idx, &head);
    w.heads = heads_of_work_tile<C>(p, whole.y);
    w.first_head = head * p.group + split_of_work_tile(whole.y) * w.heads;
    w.target_at = 0;  // by the head
  } else {
    work_tile_coords(p, number / p.splits_per_tile, &w.order_idx, &head);
    const int part = number % p.splits_per_tile, l2_group = number / p.work_tiles_per_l2_group;
    w.heads = p.heads_per_split;
    w.first_head = head * p.group + part * w.heads;
    w.target_at = (p.order[0] & kLaterTargets && l2_group > 0 ? p.work_tiles_per_l2_group : 0) +
                  (head - l2_group * p.heads_per_l2_group) * p.splits_per_tile + part;
  }
  w.tile = p.plan[plan.words_order + w.order_idx];
  w.target_at += w.tile * p.work_tiles_per_tile;
  return w;
}

template <typename C>
void add_steps(const BwdKernelParams& p, const WorkTileOfKernel& w) {
  const int flags = p.order[0];
  const Traversal traversal = ordered_traversal(flags, w.order_idx >= p.wave);
  const int shift = is_split_in_order<C>(p) ? 0 : ordered_shift(p.order, w.order_idx, p.wave);
  const int2 segments = segments_of_tile(p.plan, w.tile);
  const size_t before = found.counter.size();
  const auto add = [&](int block, int i) {
    const int head = w.first_head + i;
    found.counter.push_back(head * p.num_m_blocks + block);
    const int at = is_split_in_order<C>(p) ? w.target_at + (head >> p.heads_shift) : w.target_at;
    found.target.push_back(p.semaphore_targets[int64_t(block) * p.targets_per_block + at]);
  };
  const bool by_head = flags & kByHead;
  for (int s = 0; s < segments.y; ++s) {
    const int2 range = segment_blocks<C::kBlockM>(p.plan, segments.x + s);
    const auto again = [&] { return range; };
    for (int outer = 0; outer < (by_head ? w.heads : 1); ++outer) {
      MBlockIter order(range, traversal, shift);
      for (; order.left() > 0;
           order.step(again, [&] { return traversal == Traversal::kDescending; }))
        for (int i = by_head ? outer : 0; i < (by_head ? outer + 1 : w.heads); ++i)
          add(order.block, i);
    }
  }
  found.count.push_back(int64_t(found.counter.size() - before));
}

template <typename C>
void run(const magi_ffa_bwd_params& a, int sms, uint64_t seed) {
  BwdKernelParams k;
  BwdRowParams r;
  bwd_scalars<C>(a, nullptr, sms, &k, &r);
  hopper::run_grid(1, kThreads, 0, bwd_plan_semaphores<kThreads, C::kBlockM>, r, seed);
  hopper::run_grid(k.num_m_blocks, kThreads, 0, assign_targets<C::kBlockM>, r, seed);
  found = {};
  found.flags = k.order[0];
  const int parts = bwd_deterministic_splits(a),
            work_tiles =
                k.num_tiles * k.heads_kv * k.splits_per_tile + (parts - 1) * k.num_partials;
  for (int number = 0; number < work_tiles; ++number) add_steps<C>(k, work_tile_of<C>(k, number));
}

template <int kDim, int kBlockM>
using Deterministic = BwdConfig<bf16, kDim, kDim, false, true, kBlockM>;

template <typename Call>
auto with_config(const magi_ffa_bwd_params& a, Call call) {
  if (a.head_dim <= 64) return call(Deterministic<64, kBlockM64>{});
  if (a.block_m == kBlockM80) return call(Deterministic<128, kBlockM80>{});
  return call(Deterministic<128, kBlockM64>{});
}

}  // namespace

extern "C" {

int64_t workspace_bytes(const magi_ffa_bwd_params* a, int sms) {
  return with_config(*a, [&](auto c) { return bwd_bytes<decltype(c)>(*a, sms).workspace; });
}

// NULL, or what a kernel did wrong; the number of work tiles and of steps.
const char* assign(const magi_ffa_bwd_params* a, int sms, uint64_t seed, int64_t* sizes) {
  return hopper::error_of([&] {
    with_config(*a, [&](auto c) { run<decltype(c)>(*a, sms, seed); });
    sizes[0] = int64_t(found.count.size());
    sizes[1] = int64_t(found.counter.size());
  });
}

int flags() { return found.flags; }

void steps_of(int64_t* count, int32_t* counter, int32_t* target) {
  std::copy(found.count.begin(), found.count.end(), count);
  std::copy(found.counter.begin(), found.counter.end(), counter);
  std::copy(found.target.begin(), found.target.end(), target);
}

// Blocks `first` to `end` in the order of a traversal, and the place that each is said to have.
// Returns how many there are, or -1 if more than there should be.
int traverse(int first, int end, int traversal, int shift, int32_t* blocks, int32_t* places) {
  const int2 range{first, end};
  const auto how = static_cast<Traversal>(traversal);
  const auto again = [&] { return range; };
  int count = 0;
  for (MBlockIter order(range, how, shift); order.left() > 0;
       order.step(again, [&] { return how == Traversal::kDescending; })) {
    if (count == end - first) return -1;
    blocks[count] = order.block;
    places[count++] = place_in_traversal(range, how, shift, order.block);
  }
  return count;
}

// Block, head and 64 columns of each of so many items. `sizes`: blocks, query heads, kv heads, kv
// heads of an L2 group, and how often there are 64 columns.
void items_of(const int32_t* sizes, int count, int32_t* items) {
  const struct {
    int32_t heads_q, heads_kv, heads_per_l2_group, dim_blocks;
  } p{sizes[1], sizes[2], sizes[3], sizes[4]};
  for (int number = 0; number < count; ++number, items += 3) {
    const PostprocessItem x = postprocess_item(p, sizes[0], number);
    items[0] = x.order_idx, items[1] = x.head, items[2] = x.d;
  }
}

// Whether a call with m-blocks of 80 may split tiles as it says.
int may_split(const magi_ffa_bwd_params* a, int sms) {
  return bwd_is_split_run(*a) &&
         bwd_has_deterministic_split<Deterministic<128, kBlockM80>>(*a, sms);
}

int can_store_direct(const magi_ffa_bwd_params* a) { return bwd_can_store_direct(*a); }

int64_t workspace_of(const magi_ffa_bwd_params* a, int sms) {
  return bwd_bytes<BwdConfig<bf16, 128, 128, false, false, kBlockM80>>(*a, sms).workspace;
}
}
