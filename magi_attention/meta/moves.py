# SPDX-License-Identifier: Apache-2.0
"""Whether queries move in a plan: the solver is asked where that may save time, and its answer taken where it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import sum_by
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import Cut
from magi_attention.meta.dispatch import check_partitions
from magi_attention.meta.plan import QUERY_MOVES, Plan
from magi_attention.meta.solver.links import count_rows
from magi_attention.meta.solver.ownership import owners
from magi_attention.meta.solver.partition import min_heap, sequential
from magi_attention.meta.solver.placement import Cells
from magi_attention.meta.solver.query_moves import KEY_COST, Moves, choose_moves

LEAST_TIME = 0.05  # with "auto" queries move if that saves this share of the modelled time
# Where queries move, attention goes stage by stage. A forward and its backward then take the host so many seconds, and
# the GPU so many more than in one launch: two H200, 8,192 to 65,536 tokens a rank, 8 heads (docs/query-moves.md).
STAGED_HOST_S, STAGED_EXTRA_S = 1.9e-3, 0.5e-3
MOST_LOAD = 1.02  # moves give no rank more than this times the mean load


class Dispatched(NamedTuple):
    """A sequence in chunks, and who holds them."""

    chunk: int
    pad: int
    cut: Cut
    partitions: tuple[tuple[int, ...], ...]
    imbalance: float  # heaviest rank over the mean


def with_moves(
    choice: Dispatched, heads: tuple[int, int, int], query_moves: str, rates: MachineRates | None, may_dispatch: bool,
    groups: int = 1,
) -> tuple[Dispatched, tuple[NDArray[np.int64], ...] | None]:  # fmt: skip
    """Who computes what, if queries may move and that pays. Work goes where keys are then, so with ``may_dispatch`` the
    chunks may be given to other ranks. ``groups``: as of ``choose_moves``."""
    if query_moves not in QUERY_MOVES:
        raise ContractError(f"query_moves is {query_moves!r}; give one of {', '.join(QUERY_MOVES)}.")
    world = len(choice.partitions)
    if query_moves == "never" or world == 1:
        return choice, None
    given, cut, bounds = choice, choice.cut, choice.cut.bounds
    cells = Cells.cut(cut.pieces, cut.chunk_of, bounds)
    most = MOST_LOAD * float(cells.area.sum()) / world
    owner = owners(choice.partitions, len(bounds))
    before = sum_by(owner, cut.work, world)
    if query_moves == "auto" and not _may_pay(cut, owner, before, heads, rates or MachineRates()):
        return choice, None
    moves = first = choose_moves(cells, owner, world, heads[:2], most, groups)

    def try_dispatch(parts: Sequence[Sequence[int]] | None) -> None:
        nonlocal moves, owner, choice
        if parts is None or (other := owners(parts, len(bounds))).tolist() == owner.tolist():
            return
        found = choose_moves(cells, other, world, heads[:2], most, groups)
        if found.cost < moves.cost and found.loads.max() <= max(most, moves.loads.max()):
            moves, owner = found, other
            choice = choice._replace(partitions=check_partitions(parts, len(bounds), world))

    if may_dispatch:
        # Work may follow the keys: so contiguous blocks may balance that would not if keys alone moved.
        try_dispatch(sequential([1] * len(bounds), world)[1])
        try_dispatch(min_heap(moves.chunk_loads(cells, owner).tolist(), world)[1])
    if query_moves == "auto":
        costs = (moves.cost, first.cost_of_keys), (int(moves.loads.max()), int(before.max()))
        with_moves, without = step_seconds(*costs, heads, world, rates or MachineRates())
        if with_moves > (1 - LEAST_TIME) * without:
            return given, None
    return choice, moves.assigned(cells, owner)


def _may_pay(
    cut: Cut, owner: NDArray[np.int64], before: NDArray[np.int64], heads: tuple[int, int, int], rates: MachineRates,
) -> bool:  # fmt: skip
    """Would it save time if moves sent nothing and were balanced? The solver takes seconds for many ranks, and where
    keys do not wait for the link it need not be asked. ``before``: areas of the ranks."""
    cost = KEY_COST * heads[1] * int(count_rows(cut, owner, len(before)).sum())
    loads = -(-int(before.sum()) // len(before)), int(before.max())
    best, without = step_seconds((0, cost), loads, heads, len(before), rates)
    return best <= (1 - LEAST_TIME) * without


def query_moves_of(plan: Plan) -> Moves:
    """What ``choose_moves`` finds for the mask and the dispatch of a plan, whatever was asked for."""
    bounds = plan.chunk_ranges
    cut = Cut.of(plan.slices.array, bounds)
    cells, heads = Cells.cut(cut.pieces, cut.chunk_of, bounds), (plan.num_heads_q, plan.num_heads_kv)
    return choose_moves(cells, plan.rank_of_chunk, plan.cp_size, heads, MOST_LOAD * plan.slices.area / plan.cp_size)


def step_seconds(
    cost: tuple[int, int], load: tuple[int, int], heads: tuple[int, int, int], world: int, rates: MachineRates
) -> tuple[float, float]:
    """Modelled seconds of a forward and its backward, with moves and with keys alone: of both ``cost`` as of ``Moves``,
    and the area of the heaviest rank. Keys alone travel while the kernel runs; with moves little of it is hidden."""
    pair, value = sum(rates.pair_seconds(*heads)), rates.bytes_seconds(heads[2] * rates.element_bytes) / world
    moves = load[0] * pair + cost[0] * value + STAGED_EXTRA_S
    return max(moves, STAGED_HOST_S), max(load[1] * pair, cost[1] * value)
