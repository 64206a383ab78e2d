// SPDX-License-Identifier: Apache-2.0
// The tile of MLA's form.
#pragma once

namespace magi {

constexpr int kMlaHeadDim = 576;   // of q and k, of which the first ...
constexpr int kMlaHeadDimV = 512;  // ... are the values

}  // namespace magi
