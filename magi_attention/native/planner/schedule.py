# SPDX-License-Identifier: Apache-2.0
"""Schedules of the planner library: what is chosen for a call, and its work tiles behind a tile plan."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.native import abi
from magi_attention.native.loader import check, load
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER

_OUTLINE_WORDS = 4  # of a record, of which the first two say which queries it visits


class Split(NamedTuple):
    """Tiles from ``begin`` to before ``end``, in the order of the plan, in so many ``parts``; all 0 for none."""

    begin: int
    end: int
    parts: int


NONE = Split(0, 0, 0)


class BwdSchedule(NamedTuple):
    """``block_m`` queries each; ``num_head_splits``: 0 for as few parts of the heads as the library chooses.

    ``first_writer``: the first writer to a block of dq stores, so that nothing is cleared. ``by_document``: work tiles
    are taken up one document after the other. ``split``: tiles whose query heads are split, in deterministic order.
    ``direct_dq_store``: the main kernel writes dq of blocks with a single contribution, if that is in 16 bits and not
    accumulated.
    """

    block_m: int
    num_head_splits: int
    first_writer: bool = False
    by_document: bool = False
    split: Split = NONE
    direct_dq_store: bool = False

    def has_order(self, is_deterministic: bool) -> bool:
        """Whether the plan says in which order work tiles are taken up, where there is no work list.

        In deterministic order, or where the first writer stores, kernels follow the order of the tiles, and have work
        tiles only where that is by document.
        """
        if is_deterministic or self.first_writer:
            return self.by_document
        return self.block_m == schedule_abi.WIDE_BLOCK_M


class ForwardSplits(NamedTuple):
    """The first ``tiles`` of the order are split into at most ``parts`` parts, of at least ``blocks`` key blocks."""

    tiles: int
    parts: int
    blocks: int


class WorkTileShape(NamedTuple):
    """What the work tiles of a call depend on, besides the mask.

    ``group`` query heads share a kv head. The call may use ``num_ctas`` of the ``num_sms`` of the device.
    ``by_document``: one document after the other. ``tail``: how many work tiles at the end are split, and into how many
    parts of their query heads. ``list_block_m``: queries of the m-blocks of a work list; 0: the call takes none.
    ``keeps_plan_order``: never in waves, to measure what these are worth.
    """

    heads_kv: int
    group: int
    num_sms: int
    num_ctas: int
    by_document: bool = False
    tail: tuple[int, int] = (0, 1)
    list_block_m: int = 0
    keeps_plan_order: bool = False

    @property
    def problem(self) -> schedule_abi.ScheduleProblem:
        """``magi_schedule_problem``."""
        heads_q, (tail, parts) = self.heads_kv * self.group, self.tail
        return schedule_abi.ScheduleProblem(
            kind=abi.BWD, heads_q=heads_q, heads_kv=self.heads_kv, num_sms=self.num_sms, num_ctas=self.num_ctas,
            takes_list=self.list_block_m > 0, tail_work_tiles=tail, tail_parts=parts,
            keeps_plan_order=self.keeps_plan_order,
        )  # fmt: skip


def outline(plan: TilePlan) -> NDArray[np.int32]:
    """The words of a plan whose records only say which queries they visit: all that ``choose`` reads."""
    words = np.concatenate([plan.words[: plan.header.words_records], plan.records[:, :_OUTLINE_WORDS].ravel()])
    header = abi.TilePlanHeader.from_buffer(words.data)
    header.segment_words, header.words_total = _OUTLINE_WORDS, len(words)
    return words


def choose(words: NDArray[np.int32], problem: schedule_abi.ScheduleProblem) -> BwdSchedule:
    """The schedule of a backward by the outline of its transposed plan.

    Raises:
        ContractError: a size is not positive. UnsupportedError: the planner library is not built.
    """
    found = _schedule(words, problem)
    split = Split(found.split_begin, found.split_end, found.num_splits)
    ways = bool(found.first_writer), bool(found.by_document)
    return BwdSchedule(found.block_m, found.num_head_splits, *ways, split, bool(found.direct_dq_store))


def with_schedule(
    words: NDArray[np.int32], shape: WorkTileShape, there_at: NDArray[np.float64] | None = None
) -> NDArray[np.int32]:
    """The words of a transposed plan with its schedule behind it: a work list, or its work tiles. By document, its
    tiles are in that order, too.

    ``there_at`` (tiles,) says in which order the keys of tiles arrive while the kernel runs. Errors as of ``choose``.
    """
    library, problem, needed = load(PLANNER), shape.problem, ctypes.c_int64()
    made = np.empty(library.magi_schedule_room(words.ctypes.data, len(words), bytes(problem)), dtype=np.int32)
    block_m = shape.list_block_m or schedule_abi.WIDE_BLOCK_M
    given = schedule_abi.ScheduleChoice(block_m=block_m, by_document=shape.by_document)
    when = None if there_at is None else np.ascontiguousarray(there_at, dtype=np.float64)
    _schedule(words, problem, given, when, made, needed)
    return made[: needed.value]


def forward_splits(plan: TilePlan, head_units: int, num_sms: int) -> ForwardSplits | None:
    """Which tiles of a forward are split along the keys; ``head_units``: how often each is worked on, for each group of
    heads that share a tile once. None where no tile is long enough."""
    sizes = {"head_units": head_units, "num_sms": num_sms, "num_ctas": num_sms}
    problem = schedule_abi.ScheduleProblem(kind=abi.FWD, tail_parts=1, **sizes)
    found = _schedule(plan.words, problem)
    return ForwardSplits(found.split_end, found.num_splits, found.min_blocks) if found.num_splits else None


def check_schedule(words: NDArray[np.int32], shape: WorkTileShape, plan_words: int) -> None:
    """Checks what ``with_schedule`` has put behind a plan of so many words; ``ContractError`` names the first tile, kv
    head or m-block that is not there once, or field that is wrong."""
    list_at, block_m = (plan_words, shape.list_block_m) if shape.list_block_m else (0, schedule_abi.WIDE_BLOCK_M)
    library = load(PLANNER)
    status = library.magi_schedule_check(words.ctypes.data, len(words), list_at, shape.heads_kv, block_m)
    check(library, status, "Checking the schedule")


def check_waits(
    steps: NDArray[np.int64], counters: NDArray[np.int32], targets: NDArray[np.int32], num_ctas: int
) -> None:
    """Checks that no work tile waits for ever, and that counters count in one order, whichever CTAs are slow.

    ``steps`` (work tiles,) of each, in the order in which they are taken; ``counters`` and ``targets`` of all steps: a
    step waits until its counter has its target, and counts. ``ContractError`` names a work tile that waits for ever, or
    whose turn depends on time.
    """
    begin = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    counter, target = (np.ascontiguousarray(x, dtype=np.int32) for x in (counters, targets))
    waits = schedule_abi.Waits(
        num_work_tiles=len(steps), num_counters=int(counter.max(initial=-1)) + 1, step_begin=begin.ctypes.data,
        counter=counter.ctypes.data, target=target.ctypes.data, num_ctas=num_ctas,
    )  # fmt: skip
    library = load(PLANNER)
    check(library, library.magi_waits_check(bytes(waits)), "Checking waits")


def _schedule(
    words: NDArray[np.int32], problem: schedule_abi.ScheduleProblem, choice: schedule_abi.ScheduleChoice | None = None,
    there_at: NDArray[np.float64] | None = None, made: NDArray[np.int32] | None = None,
    needed: ctypes.c_int64 | None = None,
) -> schedule_abi.ScheduleChoice:  # fmt: skip
    library, found = load(PLANNER), choice or schedule_abi.ScheduleChoice()
    room = (None, 0) if made is None else (made.ctypes.data, len(made))
    status = library.magi_schedule(
        words.ctypes.data, len(words), bytes(problem), ctypes.addressof(found),
        None if there_at is None else there_at.ctypes.data, *room, None if needed is None else ctypes.byref(needed),
    )  # fmt: skip
    check(library, status, "Scheduling work tiles")
    return found
