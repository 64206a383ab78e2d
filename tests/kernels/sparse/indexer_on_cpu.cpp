// SPDX-License-Identifier: Apache-2.0
// The indexer for the CPU, see emulator/README.md: its entry with all launches.
#include "device_calls.h"
#include "ffa/common/host.cu"
#include "ffa/sm90/indexer/topk.cu"
