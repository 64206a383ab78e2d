# SPDX-License-Identifier: Apache-2.0
"""Work that may fail on some ranks, and then ends on all of them for the same reason."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from peers import Unfit

from magi_attention.benchmarking.timing import reason_of
from magi_attention.errors import UnsupportedError


class CellEnds(Exception):
    """Some rank cannot go on; the text is the same on all ranks. ``is_failure`` unless this was to be expected."""

    def __init__(self, reason: str, is_failure: bool) -> None:
        super().__init__(reason)
        self.is_failure = is_failure


def attempt(work: Callable):
    """``work()``, unless it fails on some rank: then ``CellEnds`` on all. Collective."""
    result, mine = None, None
    try:
        result = work()
    except (Unfit, UnsupportedError) as unfit:
        mine = (False, str(unfit))
    except Exception as failure:  # a peer's own failure is a finding, not the end of the run
        mine = (True, reason_of(failure))
    everyone: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = [(*reason, rank) for rank, reason in enumerate(everyone) if reason]
    if not found:
        return result
    is_failure, text, rank = max(found, key=lambda f: (f[0], -f[2]))  # a failure tells more than what was expected
    raise CellEnds(text if len(found) == len(everyone) else f"rank {rank}: {text}", is_failure)
