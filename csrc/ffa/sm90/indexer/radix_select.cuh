// SPDX-License-Identifier: Apache-2.0
// The places of the highest scores of a row, or of the highest ranks, exactly: a radix select of
// the lowest score that is taken, then one pass that writes places in order. Of places with that
// score the first are taken.
#pragma once

#include <cstdint>

#include "ffa/sm90/index/sum_before.cuh"
#include "ffa/sm90/indexer/rank.cuh"

namespace magi {

constexpr int kDigits = 3, kDigitBits = 11;  // the last one has 10
constexpr int kBins = 1 << kDigitBits;

// Four scores of a row, from a multiple of 4 on. Those that are not among the seen are none.
struct FourScores {
  static constexpr int kStep = 4 * kPrepareThreads;  // from one turn of a thread to its next
  uint32_t ranks[4];
  bool is_seen[4];

  template <typename Score>
  __device__ __forceinline__ FourScores(const Score* row, int at, int2 seen) {
    struct alignas(16) Four {
      Score x[4];
    };
    // No __ldg: threads of this CTA may have written the row.
    const Four four = at < seen.y ? *reinterpret_cast<const Four*>(row + at) : Four{};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ranks[i] = rank_of(four.x[i]);
      is_seen[i] = at + i >= seen.x && at + i < seen.y;
    }
  }

  // This thread's first ones.
  static __device__ __forceinline__ int begin(int2 seen) {
    return seen.x / 4 * 4 + 4 * static_cast<int>(threadIdx.x);
  }
};

struct Threshold {
  uint32_t rank;  // scores above it are taken,
  int equals;     // and of those that are equal no more than so many
};

// The CTA finds the bin in which the `wanted`-th rank from above is. `bins` hold counts; found[0]
// is the bin, found[1] how many are wanted of it.
__device__ __forceinline__ void find_bin(const uint32_t* bins, int wanted, uint32_t* warps,
                                         int* found) {
  constexpr int kMine = kBins / kPrepareThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kMine;  // my bins go down from here
  int mine = 0, total;
  for (int i = 0; i < kMine; ++i) mine += static_cast<int>(bins[top - i]);
  int above = sum_before(mine, warps, &total);
  if (above < wanted && wanted <= above + mine) {
    int bin = top;
    while (above + static_cast<int>(bins[bin]) < wanted) above += static_cast<int>(bins[bin--]);
    found[0] = bin;
    found[1] = wanted - above;
  }
  __syncthreads();
}

// Counts by a digit those whose digits above are `upper`.
__device__ __forceinline__ void count_digit(const FourScores& x, uint32_t above, uint32_t upper,
                                            int shift, uint32_t mask, uint32_t* bins) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (x.is_seen[i] && (x.ranks[i] & above) == upper)
      atomicAdd(bins + (x.ranks[i] >> shift & mask), 1u);
}

// The rank of which some scores are the last that are taken, of `seen`, which are more than
// `wanted`.
template <typename Score>
__device__ __forceinline__ Threshold select_rank(const Score* row, int2 seen, int wanted,
                                                 uint32_t* bins, uint32_t* warps, int* found) {
  Threshold threshold{0, wanted};
#pragma unroll 1
  for (int digit = 0; digit < kDigits; ++digit) {
    const int shift = digit == 2 ? 0 : 21 - kDigitBits * digit;
    const uint32_t mask = digit == 2 ? 0x3ff : kBins - 1;
    const uint32_t above = digit == 0 ? 0 : 0xffffffffu << (digit == 2 ? 10 : 21);
    for (int i = threadIdx.x; i < kBins; i += kPrepareThreads) bins[i] = 0;
    __syncthreads();
    // Several loads are under way at a time.
    for (int at = FourScores::begin(seen); at < seen.y; at += 2 * FourScores::kStep) {
      const FourScores x(row, at, seen), y(row, at + FourScores::kStep, seen);
      count_digit(x, above, threshold.rank, shift, mask, bins);
      count_digit(y, above, threshold.rank, shift, mask, bins);
    }
    __syncthreads();
    find_bin(bins, threshold.equals, warps, found);
    threshold.rank |= static_cast<uint32_t>(found[0]) << shift;
    threshold.equals = found[1];
    const bool is_whole = static_cast<int>(bins[found[0]]) == found[1];
    __syncthreads();
    if (is_whole) break;  // no score of the bin is left out, so the digits below do not matter
  }
  return threshold;
}

// Writes `wanted` places in order.
template <typename Score>
__device__ __forceinline__ void write_places(const Score* row, int2 seen, int wanted,
                                             const Threshold& threshold, uint32_t* warps,
                                             int32_t* to) {
  // Above and equal are counted in the halves of a word: a step has no more than kStep of either.
  int above = 0, equal = 0;
  const int begin = FourScores::begin(seen);
  for (int step = 0; seen.x / 4 * 4 + step < seen.y; step += FourScores::kStep) {
    const int at = begin + step;
    const FourScores x(row, at, seen);
    int counts = 0, total;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (x.is_seen[i])
        counts += (x.ranks[i] > threshold.rank) + ((x.ranks[i] == threshold.rank) << 16);
    const int before = sum_before(counts, warps, &total);
    int above_here = above + (before & 0xffff), equal_here = equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!x.is_seen[i] || x.ranks[i] < threshold.rank) continue;
      const bool is_equal = x.ranks[i] == threshold.rank;
      const int equals = equal_here < threshold.equals ? equal_here : threshold.equals;
      if (!is_equal || equal_here < threshold.equals) to[above_here + equals] = at + i;
      above_here += !is_equal;
      equal_here += is_equal;
    }
    above += total & 0xffff;
    equal += total >> 16;
    if (above + min(equal, threshold.equals) >= wanted) return;
  }
}

// The CTA writes the list of a row: of the places from seen.x to before seen.y the `num_best` with
// the highest scores, ascending, then -1. Where there are no more, scores are not read.
template <typename Score>
__device__ __forceinline__ void write_best(const Score* row, int2 seen, int num_best,
                                           uint32_t* smem, int32_t* to) {
  uint32_t* warps = smem;
  int* found = reinterpret_cast<int*>(warps + kPrepareWarps);
  uint32_t* bins = warps + kPrepareWarps + 2;
  const int count = seen.y - seen.x;
  if (count <= num_best) {
    for (int i = threadIdx.x; i < num_best; i += kPrepareThreads)
      to[i] = i < count ? seen.x + i : -1;
    return;
  }
  const Threshold threshold = select_rank(row, seen, num_best, bins, warps, found);
  write_places(row, seen, num_best, threshold, warps, to);
}

constexpr int kBestBytes = 4 * (kPrepareWarps + 2 + kBins);

}  // namespace magi
