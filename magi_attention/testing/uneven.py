# SPDX-License-Identifier: Apache-2.0
"""Packed documents of uneven lengths, one case for each kind of split in a work list of the backward."""

from __future__ import annotations

# On 132 SMs, in m-blocks of 64: lengths of the documents, kind of their slices, heads; tiles that are split, and work
# tiles for each kv head.
SPLIT_CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, int], int, int]] = {
    "a tile by queries": ((789, 92, 725, 268, 174), 0, (64, 16), 1, 17),
    "two tiles by queries, and the two shortest by heads": ((37, 841, 96, 1074), 0, (64, 16), 4, 24),
    "the longest by heads": ((309, 2539, 291, 149, 808), 1, (32, 8), 3, 41),
    "the shorter half by heads": ((1543, 172, 333), 0, (64, 16), 8, 40),
    "a tile by queries, and half of the tiles by heads": ((950, 477, 20, 32, 514, 55), 0, (64, 16), 8, 38),
    "two tiles by queries, and the second quarter by heads": ((474, 471, 30, 155, 413, 505), 0, (64, 16), 6, 30),
    "two tiles by queries, and others in the middle by heads": ((184, 47, 16, 1245, 556), 0, (64, 16), 8, 36),
}
