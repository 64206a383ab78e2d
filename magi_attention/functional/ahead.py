# SPDX-License-Identifier: Apache-2.0
"""What the first attention call of a rank would make of a plan, made ahead: by another thread, or in another process.

All of it lies in caches, where the call looks first. Caches are not pickled, so ``packed`` lists what travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.symm.buffers import why_no_symm_buffers
from magi_attention.comm.transport.base import Transport
from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions, Problem, Registry
from magi_attention.kernels.ffa.ahead import Kept, KernelTiles, kept_tables, take_tables
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.meta.one_launch.fused_layout import FusedLayout, RankFusedLayout
from magi_attention.meta.plan import Plan
from magi_attention.meta.rank_plan import RankPlan


@dataclass(frozen=True, eq=False)
class Ahead:
    """Layouts of the rows that travel: of each stage (None for one in which nobody receives) and of queries, or of
    attention in one launch."""

    stages: tuple[A2AVLayout | None, ...] = ()
    queries: A2AVLayout | None = None
    fused: RankFusedLayout | None = None


NOT_AHEAD = Ahead()
# By rank. Whoever uses a layout counts its arrays.
AHEAD: Kind[int, Ahead] = Kind("layouts that were made ahead", lambda ahead: ())


class Packed(NamedTuple):
    """All that was made ahead for one rank, as it is pickled."""

    part: RankPlan
    joined: SliceTable | None
    ahead: Ahead
    tables: list[Kept]


class _Call(NamedTuple):
    """Slices of one kernel call, with its queries, its keys, and how many of these are local."""

    slices: SliceTable
    queries: int
    keys: int
    local_keys: int


def prepare(plan: Plan, rank: int, kernels: KernelTiles | None) -> None:
    """Makes the part of ``rank``, its layouts and, with ``kernels``, tile plans and schedules."""
    make_layouts(plan, rank, kernels is not None and kernels.is_fused)
    if kernels is not None:
        make_tables(plan, rank, kernels)


def make_layouts(plan: Plan, rank: int, is_fused: bool) -> Ahead:
    """Layouts of the rows that travel to and from ``rank``, kept."""
    part = plan.rank(rank)
    return plan.cache.get(AHEAD, rank, lambda: _layouts(plan, part, is_fused))


def make_tables(plan: Plan, rank: int, kernels: KernelTiles) -> None:
    """Tile plans and schedules of the calls of ``rank``, kept with their slices."""
    for call in _calls(plan, plan.rank(rank), make_layouts(plan, rank, kernels.is_fused)):
        kernels.make(*call)


def _layouts(plan: Plan, part: RankPlan, is_fused: bool) -> Ahead:
    if part.queries is None and all(plan.stage_is_idle):
        return NOT_AHEAD
    if part.queries is None and is_fused:
        return Ahead(fused=FusedLayout(plan).part(part.rank))
    specs = (None if is_idle else stage.cast for stage, is_idle in zip(part.stages, plan.stage_is_idle))
    stages = tuple(None if spec is None else A2AVLayout.from_spec(spec) for spec in specs)
    return Ahead(stages, None if part.queries is None else A2AVLayout.from_spec(part.queries.cast))


def _calls(plan: Plan, part: RankPlan, ahead: Ahead) -> list[_Call]:
    """The kernel calls of the rank that have anything to compute."""
    rows, received = part.num_tokens, sum(stage.recv_rows for stage in part.stages)
    if ahead.fused is not None:
        calls = [_Call(ahead.fused.slices, rows, ahead.fused.total_keys, rows)]
    elif _is_joined(plan, part):
        calls = [_whole(part.joined, rows, rows + received)]
    else:
        calls = [_whole(part.host, rows, rows)]
        calls += [_whole(stage.slices, rows, stage.recv_rows) for stage in part.stages]
        if part.queries is not None:
            calls.append(_whole(part.queries.slices, part.queries.recv_rows, rows + received))
    return [call for call in calls if len(call.slices)]


def _is_joined(plan: Plan, part: RankPlan) -> bool:
    """Is everything fetched before one kernel runs?"""
    return part.queries is None and plan.degree == 0 and plan.num_stages == 1 and not all(plan.stage_is_idle)


def _whole(slices: SliceTable, queries: int, keys: int) -> _Call:
    return _Call(slices, queries, keys, keys)


def packed(plan: Plan) -> list[Packed]:
    """What was made ahead for each rank and is still there."""
    found = []
    for rank, ahead in plan.cache.items(AHEAD):
        part = plan.rank(rank)
        tables = [kept for call in _calls(plan, part, ahead) for kept in kept_tables(call.slices)]
        found.append(Packed(part, part.joined if _is_joined(plan, part) else None, ahead, tables))
    return found


def unpack(plan: Plan, made: list[Packed]) -> None:
    """Puts what another process made where the first call looks for it."""
    for part, joined, ahead, tables in made:
        plan.take_rank(part)
        if joined is not None:
            part.take_joined(joined)
        plan.cache.put(AHEAD, part.rank, ahead)
        take_tables(tables)


def kernel_tiles(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dims: tuple[int, int], softcap: float,
    transport: Transport, registry: Registry, policy: Any,
) -> KernelTiles | None:  # fmt: skip
    """What the kernels that will run such calls on ``device`` want to know; None if their backend makes no tile plans.
    Collective at the first call for a group of GPUs."""
    options = AttnOptions(head_dims[0] ** -0.5, softcap, deterministic=policy.deterministic)
    if heads[1] % policy.head_chunks == 0:  # else attend refuses the call
        heads = (heads[0] // policy.head_chunks, heads[1] // policy.head_chunks)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = Problem(device.type, dtype, *heads, *head_dims, options, needs_backward=True, capability=capability)
    backend, _ = registry.select(problem, policy.backend, policy.is_backend_explicit)
    if not isinstance(backend, FfaBackend):
        return None
    mode = policy.stage_mode
    is_fused = mode != "staged" and transport.size > 1 and why_no_symm_buffers(transport, mode == "fused") is None
    index = torch.cuda.current_device() if device.index is None else device.index
    return backend.tiles(index, dtype, heads, head_dims, options)._replace(is_fused=is_fused)
