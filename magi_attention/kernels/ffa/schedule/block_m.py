# SPDX-License-Identifier: Apache-2.0
"""Whether a backward takes m-blocks of 64 queries or of 80 (``docs/log/ffa_backward_wide.md``).

m-blocks of 80 are faster for their size, but segments round to larger blocks. By how much is counted. How much they
gain depends on whether work tiles are many, and on whether dq is deterministic.
"""

from __future__ import annotations

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import NARROW, WIDE, fewest_whole, tile_steps

# So many queries in wide steps take as long as one in narrow steps, by what was measured: where work tiles are many;
# and in deterministic order, if a work tile has all query heads of its tile.
_MOST_OF_MANY = 1.05
_MOST_DETERMINISTIC = 1.075
# Where work tiles are few, and listed; and if a key sees so many queries on average, listed or not.
_MOST_OF_FEW = 1.02
_MOST_OF_FEW_LONG = 1.03
_LONG_OF_FEW = 1950
MANY_WORK_TILES = 3  # for each SM, from which on work tiles are not listed


def wide_gains(
    slices: SliceTable, queries: int, keys: int, work_tiles: int, num_sms: int, is_deterministic: bool
) -> bool:
    """Whether steps of 80 are faster, with so many ``work_tiles`` of whole tiles."""
    is_whole = work_tiles >= fewest_whole(num_sms)
    if is_whole if is_deterministic else work_tiles >= MANY_WORK_TILES * num_sms:
        most = _MOST_DETERMINISTIC if is_deterministic else _MOST_OF_MANY
    elif slices.area >= _LONG_OF_FEW * max(keys, 1):
        most = _MOST_OF_FEW_LONG
    elif is_whole:
        most = _MOST_OF_FEW
    else:
        return False
    steps = tile_steps(slices, queries, keys)
    narrow, wide = int(steps.narrow.sum()) * NARROW, int(steps.wide.sum()) * WIDE
    return 0 < wide <= most * narrow  # nothing is gained where there is nothing
