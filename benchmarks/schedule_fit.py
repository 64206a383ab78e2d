# SPDX-License-Identifier: Apache-2.0
"""Fits the times in ``csrc/planner/schedule/heuristics_h100.h`` to measured backwards, and writes them there.

A row is a backward: its work tiles in the order in which CTAs take them, and how long it took. Its time is that of the
CTA that ends last, so it is linear in what that CTA did: steps, masked steps, work tiles. Which CTA ends last depends
on the times in turn. So work tiles are placed by the times of the fit before, and least squares are solved again,
until the times stand still.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LATE_SHARE = 0.75  # kLateShare: of the time in which some CTAs have ended, in deterministic order
LATE_STEPS = 0.5  # for each m-block and query head that late CTAs prepare
_ROUNDS = 60
BEGIN = "// ---- fitted: `python benchmarks/kernel.py refit` writes the lines of this part\n"
END = "// ---- end of what is fitted\n"


@dataclass(frozen=True)
class Row:
    """``steps``, ``masked`` (work tiles,): steps of one query head, and those of them that need a mask. ``partials``:
    parts of dk and dv in memory, or in a list tiles that have any. ``rows`` of q, of all heads. ``late``: CTAs that
    first prepare ``late_blocks`` m-blocks of a head."""

    is_deterministic: bool
    block_m: int
    num_ctas: int
    steps: Sequence[float]
    masked: Sequence[float]
    partials: int
    rows: int
    us: float
    late: int = 0
    late_blocks: int = 0


class Fit(NamedTuple):
    constants: dict[str, float]
    error: float  # root mean square of the relative error of a time
    rows: int


def last_cta(row: Row, step: float, masked: float, work_tile: float) -> np.ndarray:
    """Steps, masked steps and work tiles of the CTA that ends last."""
    late_steps = LATE_STEPS * row.late_blocks / row.late if row.late else 0.0
    free_at = [(0.0, i, 0.0, 0.0, 0.0) for i in range(row.num_ctas - row.late)]
    free_at += [(late_steps * step, i, late_steps, 0.0, 0.0) for i in range(row.num_ctas - row.late, row.num_ctas)]
    heapq.heapify(free_at)
    last = (0.0, 0, 0.0, 0.0, 0.0)
    for count, of_it in zip(row.steps, row.masked):
        time, cta, steps, masks, tiles = free_at[0]
        time += step * count + masked * of_it + work_tile
        after = (time, cta, steps + count, masks + of_it, tiles + 1)
        heapq.heapreplace(free_at, after)
        last = max(last, after)
    return np.array(last[2:])


def _list_features(row: Row, times: np.ndarray) -> list[float]:
    return [*last_cta(row, times[0], times[1], times[2]), row.partials, 1.0]


def _deterministic_features(row: Row, times: np.ndarray) -> list[float]:
    is_narrow = row.block_m == 64
    end = last_cta(row, times[1 if is_narrow else 0], 0.0, times[2])
    even = np.array([sum(row.steps), 0.0, len(row.steps)]) / row.num_ctas
    steps, _, work_tiles = (1 - LATE_SHARE) * even + LATE_SHARE * end
    return [0.0 if is_narrow else steps, steps if is_narrow else 0.0, work_tiles, row.partials, row.rows, 1.0]


def _solve(rows: Sequence[Row], features, start: Sequence[float], what: str) -> tuple[np.ndarray, float]:
    """Microseconds of each feature, and the error; the best of all rounds, as the last two may alternate."""
    us = np.array([row.us for row in rows])
    times, best, best_error = np.array(start), None, np.inf
    for _ in range(_ROUNDS):
        x = np.array([features(row, times) for row in rows]) / us[:, None]
        scale = np.maximum(np.abs(x).max(axis=0), 1e-30)
        found, _, rank, _ = np.linalg.lstsq(x / scale, np.ones(len(us)), rcond=1e-9)
        if rank < x.shape[1]:
            raise ValueError(f"The rows of {what} do not tell all times apart; measure masks that differ more.")
        found = found / scale
        now = np.array([features(row, found) for row in rows]) / us[:, None]
        error = float(np.sqrt(np.mean((now @ found - 1) ** 2)))
        if error < best_error:
            best, best_error = found, error
        if np.allclose(found, times, rtol=1e-12, atol=0):
            break
        times = np.maximum(found, 1e-9)
    assert best is not None
    if (best[:-1] <= 0).any():
        raise ValueError(
            f"The times of {what} came out as {np.round(best[:-1], 5).tolist()} us, and each must be more than 0: "
            "measure more rows, on a quiet GPU."
        )
    return best, best_error


def fit(rows: Sequence[Row]) -> tuple[Fit, Fit]:
    """Work lists in m-blocks of 64, and of tile splits in deterministic order; ``ValueError`` if rows are too few
    or too much alike."""
    lists = [row for row in rows if not row.is_deterministic]
    ordered = [row for row in rows if row.is_deterministic]
    (step, masked, tile, partial, _), error = _solve(lists, _list_features, [1.0, 0.1, 2.0, 0, 0], "work lists")
    of_lists = {
        "kMaskedStepTime": 8 * (step + masked) / step,
        "kWorkTileTime": 8 * tile / step,
        "kPartialTime": 8 * partial / step,
    }
    start = [1.0, 0.85, 2.0, 0, 0, 0]
    (wide, narrow, tile, part, row, _), ordered_error = _solve(ordered, _deterministic_features, start, "tile splits")
    of_splits = {
        "kNarrowStep": narrow / wide,
        "kTileSplitBeginAndEnd": tile / wide,
        "kPart": part / wide,
        "kRows": wide / row,
    }
    return Fit(of_lists, error, len(lists)), Fit(of_splits, ordered_error, len(ordered))


# ---- the header ------------------------------------------------------------------------------------------------------
_LISTS = "// Work lists. Times are in eighths (kStepTime) of a step of 64 queries that needs no mask."
_SPLITS = "// Tile splits in deterministic order, in steps of 80 queries of one query head."
_WHAT = {
    "kMaskedStepTime": "a step of 64 that needs a mask",
    "kWorkTileTime": "to begin and end a work tile",
    "kPartialTime": "to combine the parts of one",
    "kNarrowStep": "a step of 64",
    "kTileSplitBeginAndEnd": "to begin and end a work tile",
    "kPart": "to leave a part in memory and add it up",
    "kRows": "rows of q that take a step before and behind",
}
_OF_LISTS = ("kMaskedStepTime", "kWorkTileTime", "kPartialTime")


def constants_of(header: str) -> dict[str, float]:
    """The fitted constants that a header has."""
    found = re.findall(r"^constexpr (?:int|double) (k\w+) = ([\d.e+-]+);", _part(header), re.MULTILINE)
    return {name: float(value) for name, value in found}


def source_of(header: str) -> list[str]:
    """What the header says its constants are from."""
    lines = _part(header).splitlines()
    return [line.removeprefix("// ") for line in lines[: lines.index(_LISTS)]]


def with_constants(header: str, constants: dict[str, float], source: Sequence[str]) -> str:
    """The header with other fitted constants; ``source``, lines of a comment, says from what."""
    lines = [f"// {line}" for line in source]
    for title, names in ((_LISTS, _OF_LISTS), (_SPLITS, [n for n in _WHAT if n not in _OF_LISTS])):
        lines.append(title)
        made = {name: _declared(name, constants[name]) for name in names}
        lines += [f"{text:<{max(map(len, made.values()))}}  // {_WHAT[name]}" for name, text in made.items()]
    return header.replace(_part(header), "\n".join(lines) + "\n")


def _declared(name: str, value: float) -> str:
    if name in _OF_LISTS:
        return f"constexpr int {name} = {max(round(value), 1)};"
    return f"constexpr double {name} = {value:.4g};"


def _part(header: str) -> str:
    before, begin, behind = header.partition(BEGIN)
    part, end, _ = behind.partition(END)
    if not begin or not end:
        raise ValueError(f"The header has no part from {BEGIN.strip()!r} to {END.strip()!r}; take that of the tree.")
    return part
