// SPDX-License-Identifier: Apache-2.0
// The constants of the schedule that were measured on an H100, in one table. Times of steps and
// work tiles are fitted by `benchmarks/kernel.py refit`, limits by `benchmarks/kernel.py modes`.
// docs/log says how: ffa_backward_wide.md, ffa_backward_modes.md, ffa_backward_order.md,
// ffa_backward_turns.md, head_dims.md, sparse.md. Host and device read them.
#pragma once

namespace magi {

// In deterministic order L2 groups are twice as large with up to so many query heads in a work
// tile, if all work tiles descend; these do where so many tiles for each of few query heads are in
// work at the same time.
constexpr int kLargeL2Groups = 2;
constexpr int kManyTiles = 8;
// Portable kernels: head units of an L2 group at least.
constexpr int kLeastPortableUnits = 16;
// A tile of so many segments, as under block-sparse masks, is walked once for each query head.
constexpr int kManySegments = 4;

namespace h100 {

constexpr int kStepTime = 8;  // the unit of work lists is an eighth of a step

// ---- fitted: `python benchmarks/kernel.py refit` writes the lines of this part
// By 35 to 100 masks (work lists) and 94 masks and heads (tile splits), a step of 80 being 2.6 us.
// Work lists. Times are in eighths (kStepTime) of a step of 64 queries that needs no mask.
constexpr int kMaskedStepTime = 9;  // a step of 64 that needs a mask
constexpr int kWorkTileTime = 21;   // to begin and end a work tile
constexpr int kPartialTime = 1;     // to combine the parts of one
// Tile splits in deterministic order, in steps of 80 queries of one query head.
constexpr double kNarrowStep = 0.848;          // a step of 64
constexpr double kTileSplitBeginAndEnd = 1.9;  // to begin and end a work tile
constexpr double kPart = 0.14;                 // to leave a part in memory and add it up
constexpr double kRows = 3200;                 // rows of q that take a step before and behind
// ---- end of what is fitted

// ---- many and few work tiles, for each SM
constexpr int kManyWorkTiles = 3;  // from which on there is no work list

// ---- block_m: m-blocks of 80 or 128 may have so many times the queries that those of 64 have
constexpr double kMostOfMany = 1.05;          // where work tiles are many
constexpr double kMostDeterministic = 1.075;  // in deterministic order, of whole work tiles
constexpr double kMostOfFew = 1.02;           // where work tiles are few
constexpr double kMostOfFewLong = 1.03;       // the same, if a key sees kLongOfFew queries
constexpr int kLongOfFew = 1950;
constexpr double kMostOfSmallDims = 1.12;  // m-blocks of 128, head dims up to 64
constexpr int kFewDim = 96;  // head dims up to this take 80 only where work tiles are many

// ---- head splits of all tiles
constexpr int kMostSplitDim = 128;              // nothing was measured with head dims above it
constexpr double kSplitBeginAndEnd = 3;         // of a work tile, in steps
constexpr double kHalvesGain = 0.9;             // of the time of whole tiles, what halves may take
constexpr double kAlone = 1.25, kEnough = 1.1;  // times an even share: whole tiles, and parts
constexpr double kHeadPart = 0.03;  // to leave a part of a tile in memory and add it up, in steps
constexpr double kBalancedGain = 0.97;  // of the time of the parts that the library makes
constexpr int kMostBalanced = 12;       // parts for each SM, more are even enough

// ---- tile splits, in deterministic order
constexpr int kMostInPairs = 2;  // parts of which any run of tiles is; of more only those in front
constexpr int kFirstTiles = 3;
constexpr int kEdges = 6;            // places among the tiles where runs begin and end
constexpr double kLateShare = 0.75;  // of the time that counts in which some CTAs have ended
constexpr double kSplitGain = 0.98;  // of the time of whole tiles, what split ones may take

// ---- one document after the other
constexpr double kBeginAndEnd = 0.1;  // of a work tile, in steps of 80 queries
constexpr double kInL2 = 192;      // blocks of 80 queries of one head whose Q, dO and dq stay in L2
constexpr double kLooked = 40000;  // visits that are looked at
constexpr double kLookedAt = 0.4;  // of the work, where those are in the middle
constexpr int kOneBlockIn = 4;     // is looked at
constexpr double kLeastSingle = 0.9;       // of the work, which must be of tiles of one segment
constexpr int kLeastTiles = 2;             // of a document on average
constexpr double kMinGain = 0.08;          // the estimate is a logarithm
constexpr double kMinGainNotCausal = 0.2;  // deterministic, few query heads, not only causal ones
constexpr double kAnyGain = -0.9;          // any estimate will do
constexpr int kAnyGainMaxKeys = 2000;      // that a query sees, with two query heads
constexpr int kAnyGainMaxWorkTiles = 5;    // for each SM, with one
constexpr int kLongDocuments = 2100;  // keys that a query sees: atomic dq, documents not causal

// ---- the waves of causal masks
constexpr int kSlack = 12;             // blocks by which tiles may miss a wave and still fill it
constexpr int kMostBeyond = 4;         // blocks by which they may be longer
constexpr int kUnfilled = 24;          // blocks, what a wave that is not filled counts for
constexpr int kLastWaves = 2;          // that go by cost
constexpr double kMostOut = 0.1;       // of the work, which may be out of step
constexpr double kLeastAligned = 0.9;  // of the work, which must be of tiles that see the end

// ---- dq: when the first writer stores. A query must see at most `max_keys` on average in the
// plan's own order, or `max_keys_by_document` by document, which has to gain `min_gain`; and this
// share of the blocks of 64 queries must have a single contribution.
struct FirstWriterLimits {
  int max_keys, max_keys_by_document;
  double min_gain, min_single_share;
};
constexpr FirstWriterLimits kNever{-1, -1, 0, 0};
constexpr FirstWriterLimits kFewOfAnSm{1100, 1100, kMinGain, 0};
constexpr FirstWriterLimits kManyOfAnSm{3600, 10000, -0.04, 0};
constexpr FirstWriterLimits kSmallGroups{400, 520, -0.04, 0};
constexpr FirstWriterLimits kSplitHeads{640, 0, 0, 0};
constexpr FirstWriterLimits kSplitHeadsFewKeys{1100, 0, 0, 0};
constexpr FirstWriterLimits kDim64{640, 0, 0, 1.0 / 3};
constexpr FirstWriterLimits kDim256{130, 520, -0.04, 0};
constexpr int kMinGroup = 4;  // query heads of a kv head, from which on groups are not small
constexpr int kMinDqBytes = 32 << 20;    // of dq_accum; less stays in L2
constexpr int kFewKeysRatio = 4;         // queries for each key, from which on keys are few
constexpr double kMinDirectShare = 0.1;  // of the blocks, single contributions that pay to look for
// Queries that a key sees, from which on m-blocks of 80 are faster than halves of the heads.
constexpr int kMinQueriesWithoutHalves = 3072;

// ---- work lists. A step of 80 queries counts as one of 64; that it takes longer decides nothing.
constexpr int kMayBeCut = 8;  // of the longest tiles, two at most
// Factors on the end of candidates, from measurements of each on 35 to 100 masks. The shorter half
// by heads ends about 8% later than SMs that share the work evenly.
constexpr double kShorterHalfEnd = 1.08, kShorterHalf = 1.03;
constexpr double kWorthHalves = 1.06, kWorthHalvesWide = 1.04;  // in m-blocks of 64, and of 80
constexpr double kCutTiles = 1.02;
constexpr int kMostLongest = 4;  // tiles that are split by heads, the longest ones
constexpr double kLongestSplit = 1.2, kLongestNotHalf = 1.06;
constexpr double kBesideCut = 1.0, kBesideTwoCuts = 1.01, kShortestSplit = 1.02;
// SMs at least for each kv head of a tile that fills: with 44 kv heads of 4 query heads filling
// took 1.2 times as long.
constexpr int kFewParts = 4, kShortest = 2;

// ---- splits of a forward along the keys
constexpr int kMostForwardSplit = 320;  // work tiles: the workspace has a counter for each
constexpr int kLeastBlocks = 8;         // of a part: it leaves its output in memory
constexpr double kLong = 1.5;           // times an SM's share, from where on a tile is split
constexpr double kSplitEnd = 1.1;       // times an SM's share, where all end then
// What splits cost, in blocks of 128 keys: the kernel that can, and each part (docs/log/heads.md).
constexpr double kSplitCall = 5, kSplitPart = 0.1;

}  // namespace h100
}  // namespace magi
