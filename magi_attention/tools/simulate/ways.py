# SPDX-License-Identifier: Apache-2.0
"""Every way of spreading attention, by name, and how it does on a mask over some GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from magi_attention.common.mask import Mask
from magi_attention.config import (
    DispatchConfig,
    DistAttnConfig,
    LocalityDispatchAlg,
    OverlapConfig,
    SequentialDispatchAlg,
)
from magi_attention.config.rates import BACKWARD_FLOPS, FORWARD_FLOPS
from magi_attention.errors import UnsupportedError
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.tools.simulate import ours, peers
from magi_attention.tools.simulate.events import Outcome
from magi_attention.tools.simulate.kernels import KernelTimes, kind_of
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.one_launch import one_launch
from magi_attention.tools.simulate.spread import Spread, spread
from magi_attention.tools.simulate.support import largest_error
from magi_attention.tools.simulate.traffic import PlanWork, evened, work_of

BALANCE = 1.02  # of ``make_plan``


@dataclass
class Case:
    """One mask over ``ranks`` GPUs of ``cluster``, and what is counted of it: once for all speeds of a network.
    ``is_even``: of our plans, as if every rank sent and received as much as the mean. ``knows_nodes``: their dispatch
    knows which ranks share a node. ``plan_of`` gives a plan of one's own for a number of stages."""

    mask: Mask
    ranks: int
    cluster: Cluster
    is_even: bool = False
    knows_nodes: bool = True
    plan_of: Callable[[int], Plan] | None = None
    _plans: dict[tuple[int, bool], PlanWork] = field(default_factory=dict, repr=False)
    _spreads: dict[int, Spread] = field(default_factory=dict, repr=False)

    def plan_work(self, degree: int, is_sequential: bool = False) -> PlanWork:
        """The work of our plan with ``degree`` stages; ``is_sequential``: rank r holds the r-th run of tokens."""
        key = degree, is_sequential
        if key not in self._plans and self.plan_of is not None and not is_sequential:
            self._plans[key] = work_of(self.plan_of(degree), self.cluster.node, self.cluster.levels)
        elif key not in self._plans:
            cluster, alg = self.cluster, SequentialDispatchAlg() if is_sequential else LocalityDispatchAlg()
            dispatch = DispatchConfig(alg=alg, nodes=cluster.node if self.knows_nodes else None)
            rates = cluster.rates if cluster.rates.is_measured else None
            plan = build_plan(
                self.mask.slices, self.mask.total_q, self.ranks,
                PlanOptions(cluster.heads_q, cluster.heads_kv, cluster.head_dim, rates=rates),
                config=DistAttnConfig(dispatch, OverlapConfig(degree=degree)), balance=BALANCE,
            )  # fmt: skip
            work = work_of(plan, cluster.node, cluster.levels)
            self._plans[key] = evened(work) if self.is_even else work
        return self._plans[key]

    def spread(self, inner: int = 1) -> Spread:
        """How peers spread the mask over ``ranks / inner`` parts."""
        if inner not in self._spreads:
            self._spreads[inner] = spread(self.mask, self.ranks // inner, inner)
        return self._spreads[inner]

    @cached_property
    def kind(self) -> str:
        return kind_of(self.mask.slices.array)


Way = Callable[[Case, Cluster, bool], Outcome]


def _usp(case: Case, cluster: Cluster, is_backward: bool) -> Outcome:
    inner = peers.usp_size(case.ranks, cluster)
    return peers.ring(case.spread(inner), cluster, is_backward, inner)


WAYS: dict[str, Way] = {
    "one launch": lambda case, *rest: one_launch(case.plan_work(1), *rest),
    "one stage": lambda case, *rest: ours.staged(case.plan_work(1), *rest),
    "two stages": lambda case, *rest: ours.staged(case.plan_work(2), *rest),
    "fetch, then attend": lambda case, *rest: ours.staged(case.plan_work(0), *rest),
    "selective gather": lambda case, *rest: ours.selective_gather(case.plan_work(0, True), *rest),
    "ring": lambda case, *rest: peers.ring(case.spread(), *rest),
    "all-gather": lambda case, *rest: peers.all_gather(case.spread(), *rest),
    "ulysses": lambda case, *rest: peers.ulysses(case.spread(), *rest),
    "usp": _usp,
}
OURS = ("one launch", "one stage", "two stages", "fetch, then attend")


@dataclass(frozen=True)
class Estimate:
    """One layer: milliseconds of each direction on the slowest rank, TFLOP/s of each GPU in both, and efficiency, which
    is the time of one GPU's kernels on an equal share over that. Without a time ``reason`` says why there is none.
    ``forward_error`` and ``backward_error`` are the largest relative errors of such times in records of measured calls,
    None where there are none: then, and above ``support.LIMIT``, the time is a mere estimate."""

    way: str
    ranks: int
    forward_ms: float | None = None
    backward_ms: float | None = None
    exposed_ms: float | None = None
    tflops: float | None = None
    efficiency: float | None = None
    reason: str | None = None
    forward_error: float | None = None
    backward_error: float | None = None


def share_seconds(case: Case, cluster: Cluster, is_backward: bool) -> float:
    """One GPU's kernel on an equal share of pairs and query rows, with no communication."""
    times = KernelTimes(case.kind, cluster)
    seconds = times.seconds(case.mask.area / case.ranks, case.mask.total_q / case.ranks, is_backward)
    return float(seconds * times.hot(seconds))


def estimate(way: str, case: Case, cluster: Cluster | None = None) -> Estimate:
    """``way`` is a name of ``WAYS``; ``cluster`` may have another network than that of the case."""
    cluster = cluster or case.cluster
    try:
        forward, backward = (WAYS[way](case, cluster, is_backward) for is_backward in (False, True))
    except UnsupportedError as refusal:
        return Estimate(way, case.ranks, reason=str(refusal))
    seconds = forward.seconds + backward.seconds
    flops = (FORWARD_FLOPS + BACKWARD_FLOPS) * case.mask.area * cluster.q_values / case.ranks
    alone = share_seconds(case, cluster, False) + share_seconds(case, cluster, True)
    exposed = forward.exposed + backward.exposed
    errors = [largest_error(way, case.kind, case.ranks, case.mask.total_q, cluster, b) for b in (False, True)]
    return Estimate(
        way, case.ranks, forward.seconds * 1e3, backward.seconds * 1e3, exposed * 1e3, flops / seconds / 1e12,
        alone / seconds, None, *errors,
    )  # fmt: skip
