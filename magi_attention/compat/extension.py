# SPDX-License-Identifier: Apache-2.0
"""Python equivalents of the published C++ helper module, under its import path.

What has no meaning here raises ``UnsupportedError`` when called, never at import.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges, check_valid_cu_seqlens, is_valid_cu_seqlens
from magi_attention.compat.values.rectangle import AttnRectangle
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from magi_attention.kernels.instruments import Timers

__all__ = [
    "AttnMaskType",
    "AttnRange",
    "AttnRangeWithRank",
    "AttnRanges",
    "AttnRectangle",
    "AttnRectangles",
    "GroupCastRanges",
    "KernelBarrier",
    "argsort_ranges",
    "binary_greedy_parallel_solve",
    "check_valid_cu_seqlens",
    "compute_sparse_load_metadata",
    "cut_host_remote_buckets",
    "destroy_event",
    "elapsed_ms_event",
    "expand_attn_ranges",
    "is_valid_cu_seqlens",
    "produce",
    "reorder_ranges_and_attn_type_maps",
    "start_event",
    "stop_event",
    "unique_consecutive_pairs",
]


# ---- ranges with ranks --------------------------------------------------------------------------------


class AttnRangeWithRank(AttnRange):
    """A range and the set of ranks that want it."""

    __slots__ = ("rank_set",)

    def __init__(self, rank_set: Iterable[int], start: int, end: int) -> None:
        super().__init__(start, end)
        self.rank_set = set(rank_set)

    def __repr__(self) -> str:
        return f"{super().__repr__()} for {sorted(self.rank_set)}"

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.rank_set == getattr(other, "rank_set", None)

    __hash__ = AttnRange.__hash__

    def __reduce__(self):
        return AttnRangeWithRank, (self.rank_set, self.start, self.end)


class GroupCastRanges:
    """What each rank wants, as ascending ranges that do not overlap, each with the ranks that want it.

    Args:
        cp_size: number of ranks.
        ranges_per_rank: the ranges that each rank wants.
        split: cut at all bounds, so that no two ranges overlap; else all ranges, sorted.
    """

    def __init__(self, cp_size: int, ranges_per_rank: Sequence[AttnRanges], split: bool = True) -> None:
        if len(ranges_per_rank) != cp_size:
            raise ContractError(f"{len(ranges_per_rank)} lists of ranges for {cp_size} ranks; give one each.")
        self.cp_size = cp_size
        wanted = [(*r, rank) for rank, ranges in enumerate(ranges_per_rank) for r in ranges]
        wanted = sorted(w for w in wanted if w[0] < w[1])
        if split:
            self._ranges = self._split(wanted)
        else:
            self._ranges = [AttnRangeWithRank({rank}, start, end) for start, end, rank in wanted]

    @staticmethod
    def _split(wanted: list[tuple[int, int, int]]) -> list[AttnRangeWithRank]:
        events: dict[int, list[tuple[int, int]]] = {}
        for start, end, rank in wanted:
            events.setdefault(start, []).append((rank, 1))
            events.setdefault(end, []).append((rank, -1))
        out, open_count, last = [], {}, 0
        for point in sorted(events):
            if open_count:
                out.append(AttnRangeWithRank(open_count, last, point))
            for rank, step in events[point]:
                open_count[rank] = open_count.get(rank, 0) + step
                if open_count[rank] == 0:
                    del open_count[rank]
            last = point
        return out

    def __iter__(self):
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> AttnRangeWithRank:
        return self._ranges[index]


def expand_attn_ranges(ranges: AttnRanges, stride: int, num_heads_group: int) -> AttnRanges:
    """The ranges once per head group, group g shifted by ``g * stride`` tokens."""
    return AttnRanges.from_ranges(r.offset(g * stride) for g in range(num_heads_group) for r in ranges)


# ---- range tensors ------------------------------------------------------------------------------------


def argsort_ranges(ranges: torch.Tensor) -> torch.Tensor:
    """Stable order of ``ranges (n, 2)`` by start, then end; int32 ``(n,)``."""
    by_end = ranges[:, 1].argsort(stable=True)
    return by_end[ranges[by_end, 0].argsort(stable=True)].int()


def reorder_ranges_and_attn_type_maps(
    outer_ranges: torch.Tensor, inner_ranges: torch.Tensor, attn_type_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All three in the order of ``argsort_ranges(outer_ranges)``."""
    order = argsort_ranges(outer_ranges).long()
    types = None if attn_type_map is None else attn_type_map[order]
    return outer_ranges[order], inner_ranges[order], types


def unique_consecutive_pairs(
    sorted_ranges: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs of equal rows of ``(n, 2)``: (distinct rows ``(u, 2)``, start of each run ``(u,)``, u ``(1,)``).

    The last two are int32 on the same device.
    """
    import torch

    unique, counts = torch.unique_consecutive(sorted_ranges, dim=0, return_counts=True)
    starts = (counts.cumsum(0) - counts).int()
    return unique, starts, torch.tensor([len(unique)], dtype=torch.int32, device=sorted_ranges.device)


# ---- barrier and timers -------------------------------------------------------------------------------


class KernelBarrier:
    """A counter that ``produce`` raises and ``synchronize`` waits for, between threads of this process.

    The published one counts kernels on the device.
    """

    def __init__(self, target: int) -> None:
        self._target, self._value, self._changed = target, 0, threading.Condition()

    def synchronize(self, timeout: float | None = None) -> None:
        """Returns once the counter has reached the target; ``TimeoutError`` after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._value >= self._target, timeout):
                raise TimeoutError(f"Only {self._value} of {self._target} produced after {timeout} s.")

    def reset(self) -> None:
        with self._changed:
            self._value = 0

    def get_value(self) -> int:
        return self._value

    def _produce(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify_all()


def produce(barrier: KernelBarrier) -> None:
    """Raises the counter by one."""
    barrier._produce()


def _timers() -> Timers:
    """Those of the process, which ``MAGI_ATTENTION_PROFILE_MODE=1`` has ``flex_flash_attn_func`` fill."""
    from magi_attention.kernels.registry import default_registry

    return default_registry().instruments.timers


def start_event(name: str) -> None:
    """Begins (again) the interval ``name``."""
    _timers().start(name)


def stop_event(name: str) -> None:
    """Ends the interval ``name``; ``ContractError`` if it was not begun."""
    _timers().stop(name)


def elapsed_ms_event(name: str) -> float:
    """Milliseconds of the interval ``name``, the last one; waits for the device."""
    return _timers().elapsed_ms(name)


def destroy_event(name: str | None = None) -> None:
    """Forgets the interval ``name``, if there is one; all of them without a name."""
    _timers().destroy(name)


# ---- what is not here ---------------------------------------------------------------------------------


def compute_sparse_load_metadata(*args: Any, **kwargs: Any) -> NoReturn:
    """Not here: work lists are made on the CPU, see ``magi_attention.kernels``."""
    raise UnsupportedError("compute_sparse_load_metadata is not built; kernels here make their own work lists.")


def binary_greedy_parallel_solve(*args: Any, **kwargs: Any) -> NoReturn:
    """Not here: queries and outputs do not move in this build."""
    raise UnsupportedError("binary_greedy_parallel_solve is not built; plan with make_plan or a key.")


def cut_host_remote_buckets(*args: Any, **kwargs: Any) -> NoReturn:
    """Not here: plans cut host and remote parts, see ``magi_attention.meta``."""
    raise UnsupportedError("cut_host_remote_buckets is not built; plan with make_plan or a key.")
