// SPDX-License-Identifier: Apache-2.0
// Swaps of chunks between ranks, so that fewer rows travel at the same balance:
// magi_attention/meta/solver/locality.py, which does the same where there is no library. Ranks with
// and without one must get the same partition, so every number is computed in the same order.
#include <algorithm>
#include <exception>
#include <numeric>
#include <vector>

#include "planner/status.h"

namespace magi {
namespace {

struct Job {
  int32_t world, num_chunks, words;  // of 64 bits, in a set of chunks
  const int32_t* ends;               // of the chunks of each rank
  const int64_t* areas;
  const uint64_t* masks;  // the chunks that each chunk reads
  double chunk_cost, share_of_max, mean;
};

class Dispatch {
 public:
  Dispatch(const Job& job, int32_t* chunks) : job_(job), chunks_(chunks) {
    own_.resize(size_t(job.world) * size_t(job.words));
    loads_.resize(size_t(job.world));
    fetched_.resize(size_t(job.world));
    read_.resize(size_t(job.words));
    for (int32_t r = 0; r < job.world; ++r) {
      for (int32_t i = begin(r); i < job.ends[r]; ++i) {
        loads_[size_t(r)] += job.areas[chunks[i]];
        flip(r, chunks[i]);
      }
      fetched_[size_t(r)] = fetched(r);
    }
    energy_ = energy(*std::max_element(loads_.begin(), loads_.end()));
  }

  double energy() const { return energy_; }

  // Swaps the i-th chunk of rank r and the j-th of s, unless the energy would be above `limit`.
  bool try_swap(int32_t r, int32_t i, int32_t s, int32_t j, double limit) {
    int32_t &a = chunks_[begin(r) + i], &b = chunks_[begin(s) + j];
    const int64_t more = job_.areas[b] - job_.areas[a];
    int64_t &load_r = loads_[size_t(r)], &load_s = loads_[size_t(s)];
    load_r += more;
    load_s -= more;
    const int64_t largest = *std::max_element(loads_.begin(), loads_.end());
    if (double(largest) / job_.mean > limit) {  // whatever is fetched
      load_r -= more;
      load_s += more;
      return false;
    }
    const int64_t before_r = fetched_[size_t(r)], before_s = fetched_[size_t(s)];
    exchange(r, a, s, b);
    fetched_[size_t(r)] = fetched(r);
    fetched_[size_t(s)] = fetched(s);
    const double found = energy(largest);
    if (found <= limit) {
      energy_ = found;
      return true;
    }
    exchange(r, a, s, b);
    fetched_[size_t(r)] = before_r;
    fetched_[size_t(s)] = before_s;
    load_r -= more;
    load_s += more;
    return false;
  }

 private:
  int32_t begin(int32_t r) const { return r > 0 ? job_.ends[r - 1] : 0; }
  void flip(int32_t r, int32_t chunk) {
    own_[size_t(r) * size_t(job_.words) + size_t(chunk / 64)] ^= 1ull << (chunk % 64);
  }

  void exchange(int32_t r, int32_t& a, int32_t s, int32_t& b) {
    for (const int32_t rank : {r, s})
      for (const int32_t chunk : {a, b}) flip(rank, chunk);
    std::swap(a, b);
  }

  int64_t fetched(int32_t r) {
    std::fill(read_.begin(), read_.end(), 0);
    for (int32_t i = begin(r); i < job_.ends[r]; ++i) {
      const uint64_t* mask = job_.masks + size_t(chunks_[i]) * size_t(job_.words);
      for (size_t w = 0; w < read_.size(); ++w) read_[w] |= mask[w];
    }
    int64_t count = 0;
    for (size_t w = 0; w < read_.size(); ++w)
      count += __builtin_popcountll(read_[w] & ~own_[size_t(r) * size_t(job_.words) + w]);
    return count;
  }

  double energy(int64_t largest_load) const {
    const int64_t most = *std::max_element(fetched_.begin(), fetched_.end());
    const int64_t sum = std::accumulate(fetched_.begin(), fetched_.end(), int64_t{0});
    const double rows = job_.share_of_max * double(most) +
                        (1 - job_.share_of_max) * double(sum) / double(job_.world);
    return (double(largest_load) + job_.chunk_cost * rows) / job_.mean;
  }

  const Job& job_;
  int32_t* chunks_;
  std::vector<uint64_t> own_, read_;  // chunks of each rank; scratch
  std::vector<int64_t> loads_, fetched_;
  double energy_ = 0;
};

double swap_chunks(const Job& job, const int32_t* proposals, const double* thresholds,
                   int32_t steps, int32_t* chunks) {
  std::vector<int32_t> now(chunks, chunks + job.num_chunks);
  Dispatch dispatch(job, now.data());
  double best = dispatch.energy();
  for (int32_t step = 0; step < steps; ++step) {
    const int32_t* at = proposals + 4 * int64_t(step);
    const double limit = dispatch.energy() + thresholds[step];
    if (!dispatch.try_swap(at[0], at[1], at[2], at[3], limit) ||
        !(dispatch.energy() < best - 1e-12))
      continue;
    best = dispatch.energy();
    std::copy(now.begin(), now.end(), chunks);
  }
  return best;
}

magi_status check(const Job& job, const int32_t* proposals, int32_t steps, const int32_t* chunks) {
  for (int32_t r = 0; r < job.world; ++r)
    if (job.ends[r] < (r > 0 ? job.ends[r - 1] : 0) || job.ends[r] > job.num_chunks)
      return fail(MAGI_INVALID_ARGUMENT, "The chunks of rank %d end at %d of %d.", r, job.ends[r],
                  job.num_chunks);
  for (int32_t i = 0; i < job.num_chunks; ++i)
    if (chunks[i] < 0 || chunks[i] >= job.num_chunks)
      return fail(MAGI_INVALID_ARGUMENT, "Chunk %d is none of the %d there are.", chunks[i],
                  job.num_chunks);
  for (int64_t i = 0; i < 2 * int64_t(steps); ++i) {
    const int32_t rank = proposals[2 * i], place = proposals[2 * i + 1];
    const int32_t begin = rank > 0 && rank < job.world ? job.ends[rank - 1] : 0;
    if (rank < 0 || rank >= job.world || place < 0 || place >= job.ends[rank] - begin)
      return fail(MAGI_INVALID_ARGUMENT, "Step %lld swaps place %d of rank %d, which there is not.",
                  (long long)(i / 2), place, rank);
    if (i % 2 == 1 && rank == proposals[2 * i - 2])
      return fail(MAGI_INVALID_ARGUMENT, "Step %lld swaps chunks of rank %d with itself.",
                  (long long)(i / 2), rank);
  }
  return MAGI_OK;
}

}  // namespace
}  // namespace magi

extern "C" magi_status magi_swap_chunks(int32_t* chunks, const int32_t* ends, int32_t world,
                                        const int64_t* areas, const uint64_t* masks,
                                        int32_t num_chunks, double chunk_cost, double share_of_max,
                                        double mean, const int32_t* proposals,
                                        const double* thresholds, int32_t steps, double* energy) {
  if (world < 1 || num_chunks < 1 || steps < 0 || !(mean > 0) || chunks == nullptr ||
      ends == nullptr || areas == nullptr || masks == nullptr || energy == nullptr ||
      (steps > 0 && (proposals == nullptr || thresholds == nullptr)))
    return magi::fail(
        MAGI_INVALID_ARGUMENT,
        "world is %d, num_chunks %d and steps %d; give a rank and a chunk or more, a mean "
        "above 0, and every array.",
        world, num_chunks, steps);
  try {
    const magi::Job job{world, num_chunks, (num_chunks + 63) / 64, ends, areas,
                        masks, chunk_cost, share_of_max,           mean};
    const magi_status status = magi::check(job, proposals, steps, chunks);
    if (status == MAGI_OK) *energy = magi::swap_chunks(job, proposals, thresholds, steps, chunks);
    return status;
  } catch (const std::exception& error) {
    return magi::fail(MAGI_CAPACITY, "No host memory for the dispatch of %d chunks: %s.",
                      num_chunks, error.what());
  }
}
