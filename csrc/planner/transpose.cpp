// SPDX-License-Identifier: Apache-2.0
// The transposed mask on the host.
#include "planner/status.h"
#include "planner/tile_core.h"

extern "C" magi_status magi_tile_transpose_host(const int32_t* slices, int64_t num_slices,
                                                int32_t* transposed) {
  using magi::tile::Slice;
  if (num_slices < 0 || (num_slices > 0 && (slices == nullptr || transposed == nullptr)))
    return magi::fail(MAGI_INVALID_ARGUMENT,
                      "num_slices is %lld; give that many rows and room for three times as many.",
                      (long long)num_slices);
  for (int64_t i = 0; i < num_slices; ++i) {
    const int32_t* row = slices + 5 * i;
    if (row[4] < 0 || row[4] > 3)
      return magi::fail(MAGI_INVALID_ARGUMENT, "Slice %lld has type %d; types are 0 to 3.",
                        (long long)i, row[4]);
    Slice out[3] = {};
    magi::tile::transpose_slice(Slice{row[0], row[1], row[2], row[3], row[4]}, out);
    for (int j = 0; j < 3; ++j) {
      int32_t* to = transposed + 15 * i + 5 * j;
      to[0] = out[j].q0;
      to[1] = out[j].q1;
      to[2] = out[j].k0;
      to[3] = out[j].k1;
      to[4] = out[j].type;
    }
  }
  return MAGI_OK;
}
