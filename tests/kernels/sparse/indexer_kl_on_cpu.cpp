// SPDX-License-Identifier: Apache-2.0
// The indexer's divergence for the CPU, see emulator/README.md: its entry points with all launches,
// and the sum of shares, which is an entry of index attention.
#define MAGI_INDEX_VARIANTS_ON_CPU

#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/index/index.cu"
#include "ffa/sm90/indexer_kl/kl.cu"
