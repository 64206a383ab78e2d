// SPDX-License-Identifier: Apache-2.0
// Tile sizes and the shared-memory map of the backward kernel. Constants only; shared by host and
// device.
//
// A CTA owns a tile of keys and steps through blocks of queries. Scores are transposed: rows are
// keys. Warps share out each product on their own: kKeyWarps x kQueryWarps over scores, the same
// over dk and dv (keys x columns), and kDqRowWarps x the others over dq (queries x columns).
#pragma once

#include <cstdint>

namespace magi::portable {

struct BwdShape {
  int queries, keys, warps, key_warps, stages, ctas_per_sm;
};

// kSmall: for GPUs whose CTAs have 99 KB of shared memory (sm_86, 89, 120), else 163 KB or more.
constexpr BwdShape bwd_shape(int head_dim, bool small) {
  if (head_dim <= 64) return small ? BwdShape{64, 128, 8, 4, 2, 1} : BwdShape{128, 128, 8, 4, 2, 1};
  if (head_dim <= 128) return small ? BwdShape{64, 64, 8, 4, 1, 1} : BwdShape{64, 128, 8, 4, 2, 1};
  return small ? BwdShape{32, 32, 4, 2, 1, 1} : BwdShape{64, 64, 8, 4, 1, 1};
}

// kDropout_: with attention dropout.
template <typename T_, int kD_, bool kSmall, bool kDropout_ = false>
struct BwdConfig {
  using T = T_;
  static constexpr bool kDropout = kDropout_;
  static constexpr BwdShape kShape = bwd_shape(kD_, kSmall);
  static constexpr int kD = kD_;  // head dim of all operands, padded
  static constexpr int kBlockM = kShape.queries;
  static constexpr int kBlockN = kShape.keys;
  static constexpr int kStages = kShape.stages;  // of Q and dO
  static constexpr int kWarps = kShape.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  static constexpr int kGroups = 2;  // row groups of the plan
  // A warp's part of the scores and of dk and dv: kAtoms x 16 keys, ...
  static constexpr int kKeyWarps = kShape.key_warps;
  static constexpr int kQueryWarps = kWarps / kKeyWarps;
  static constexpr int kAtoms = kBlockN / kKeyWarps / 16;
  static constexpr int kQueries = kBlockM / kQueryWarps;  // ... queries of the scores,
  static constexpr int kColumns = kD / kQueryWarps;       // columns of dk and dv
  // A warp's part of dq.
  static constexpr int kDqRowWarps = 2;
  static constexpr int kDqAtoms = kBlockM / kDqRowWarps / 16;
  static constexpr int kDqColumns = kD / (kWarps / kDqRowWarps);
  static_assert(kAtoms >= 1 && kDqAtoms >= 1 && kQueries % 16 == 0 && kDqColumns % 16 == 0,
                "fragments are of 16 x 16");

  static constexpr int kScoreRowBytes =
      kBlockM >= 64 ? 128 : 2 * kBlockM;  // of a panel of P and dS
  static constexpr uint32_t kKeyBytes = kBlockN * kD * 2;
  static constexpr uint32_t kQueryBytes = kBlockM * kD * 2;
  static constexpr uint32_t kScoreBytes = kBlockM * kBlockN * 2;
  static constexpr uint32_t kStatBytes = 2 * kBlockM * 4;  // lse (base 2), then delta
  // Offsets from the 128-byte aligned start.
  static constexpr uint32_t kKAt = 0;
  static constexpr uint32_t kVAt = kKAt + kKeyBytes;
  static constexpr uint32_t kQAt = kVAt + kKeyBytes;
  static constexpr uint32_t kDoAt = kQAt + kStages * kQueryBytes;
  static constexpr uint32_t kPAt = kDoAt + kStages * kQueryBytes;
  static constexpr uint32_t kDsAt = kPAt + kScoreBytes;
  static constexpr uint32_t kStatsAt = kDsAt + kScoreBytes;
  static constexpr uint32_t kSegmentsAt = kStatsAt + kStages * kStatBytes;  // see bwd/steps.cuh
  static constexpr uint32_t kTileAt = kSegmentsAt + 144;
  static constexpr uint32_t kOrderAt = kTileAt + 32;  // see bwd/order.cuh
  static constexpr uint32_t kWorkAt = kOrderAt + 32;  // a word
  static constexpr uint32_t kSmemBytes = kWorkAt + 16;
  static_assert(kSmemBytes <= (kSmall ? 99u : 163u) << 10, "the shared memory of a CTA");
};

}  // namespace magi::portable
