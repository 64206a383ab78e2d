# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when ranks wait for one another: a walk over who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Awaited = Callable[[], list[int]]  # ranks waited for in vain; asked again, because more may become known


def chain_of_waits(
    awaited: Sequence[int], awaited_by: Callable[[int], Sequence[int] | None], is_gone: Callable[[int], bool]
) -> tuple[list[int], bool]:
    """From one of ``awaited`` on, each rank waits for the next one. And whether the last one is known to be gone.

    A rank waits for several at a time, so there are many chains, and some are circles. This is a shortest one to a rank
    that has told of no wait and is gone; else to one that has told of no wait; else, where all wait, to the farthest.

    Args:
        awaited: one rank or more.
        awaited_by: what a rank has told, one rank or more; None if nothing.
        is_gone: of a rank that has told nothing.
    """
    chains = {rank: [rank] for rank in awaited}
    silent = None
    for rank in (queue := list(chains)):
        told = awaited_by(rank)
        if told is None:
            if is_gone(rank):
                return chains[rank], True
            silent = rank if silent is None else silent
            continue
        new = [other for other in told if other not in chains]
        chains.update((other, [*chains[rank], other]) for other in new)
        queue += new
    return chains[queue[-1] if silent is None else silent], False
