# SPDX-License-Identifier: Apache-2.0
"""Whether a backward takes steps of 64 queries or of 80, see ``docs/log/ffa_backward_wide.md``.

Steps of 80 are the faster ones for their size, but round to larger blocks. By how much more is counted; how much they
gain depends on whether units are many, and on whether dq is summed in order.
"""

from __future__ import annotations

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import NARROW, WIDE, fewest_whole, tile_steps

# So many queries in wide steps take as long as one in narrow steps, by what was measured: where units are many; and in
# turns, if a unit has all query heads of its tile.
_MOST_OF_MANY = 1.05
_MOST_IN_TURNS = 1.075
# Where units are few, and listed; and if a key sees so many queries on average, listed or not.
_MOST_OF_FEW = 1.02
_MOST_OF_FEW_LONG = 1.03
_LONG_OF_FEW = 1950
MANY_UNITS = 3  # for each multiprocessor, from which on units are not listed


def wide_gains(slices: SliceTable, queries: int, keys: int, units: int, processors: int, in_turns: bool) -> bool:
    """Whether steps of 80 are faster, with so many ``units`` of whole tiles."""
    is_whole = units >= fewest_whole(processors)
    if is_whole if in_turns else units >= MANY_UNITS * processors:
        most = _MOST_IN_TURNS if in_turns else _MOST_OF_MANY
    elif slices.area >= _LONG_OF_FEW * max(keys, 1):
        most = _MOST_OF_FEW_LONG
    elif is_whole:
        most = _MOST_OF_FEW
    else:
        return False
    steps = tile_steps(slices, queries, keys)
    narrow, wide = int(steps.narrow.sum()) * NARROW, int(steps.wide.sum()) * WIDE
    return 0 < wide <= most * narrow  # nothing is gained where there is nothing
