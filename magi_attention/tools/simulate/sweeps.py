# SPDX-License-Identifier: Apache-2.0
"""Ways of spreading over numbers of GPUs, and what would have to change to keep an efficiency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from magi_attention.common.mask import Mask
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.ways import WAYS, Case, Estimate, estimate

MaskOf = Callable[[int], Mask]  # of so many tokens
GOAL = 0.9
_STEPS = 7  # halves of a bisection: to one part in a hundred
_TOKEN_STEPS = 4  # each of which makes a plan
_MOST_TIMES = 64.0  # as many tokens on a GPU are tried
_ENDLESS = 1e18  # bytes per second


def sweep(
    mask_of: MaskOf, gpus: Sequence[int], tokens_per_gpu: int, cluster: Cluster, ways: Sequence[str] = tuple(WAYS)
) -> Iterator[tuple[Case, Estimate]]:
    """Every way for every number of GPUs, in this order; all ranks are computed, none is sampled."""
    for ranks in gpus:
        case = Case(mask_of(ranks * tokens_per_gpu), ranks, cluster)
        for way in ways:
            yield case, estimate(way, case)


@dataclass(frozen=True)
class Answer:
    """What keeps ``goal`` for ``way`` over the GPUs of a case; None where no value does.

    ``network_bytes_per_s``: the least of each GPU's link. ``latency_s``: the most of each exchange, over NVLink and
    over the network. ``tokens_per_gpu``: the least; to one part in ten, and only where today's are too few.
    ``endless``: efficiency with a network that takes no time; ``even``: if all ranks sent and received as much as the
    mean. ``network_is_used``: anything crosses it at all.
    """

    way: str
    ranks: int
    goal: float
    efficiency: float
    endless: float
    even: float
    network_bytes_per_s: float | None
    latency_s: float | None
    tokens_per_gpu: int | None
    network_is_used: bool


def answer(way: str, case: Case, mask_of: MaskOf, goal: float = GOAL) -> Answer:
    """By bisection of the model: more bandwidth, less latency and more tokens on a GPU are taken for never worse."""
    cluster, tokens = case.cluster, case.mask.total_q // case.ranks

    def with_network(bytes_per_s: float) -> float:
        return efficiency(replace(cluster, network_bytes_per_s=bytes_per_s))

    def with_latency(seconds: float) -> float:
        known = replace(cluster.calibration, nccl_latency_s=seconds)
        rates = replace(cluster.rates, link_latency_s=seconds)
        return efficiency(replace(cluster, network_latency_s=seconds, rates=rates, calibration=known))

    def with_tokens(count: float) -> float:
        # Whole tokens for each rank, so that a step of the bisection is a mask.
        return estimate(way, Case(mask_of(int(count) * case.ranks), case.ranks, cluster)).efficiency or 0.0

    def efficiency(changed: Cluster) -> float:
        return estimate(way, case, changed).efficiency or 0.0

    now, endless = efficiency(cluster), with_network(_ENDLESS)
    even = estimate(way, Case(case.mask, case.ranks, cluster, is_even=True)).efficiency or 0.0
    slow = with_network(1e6)
    needs_more = now < goal
    return Answer(
        way, case.ranks, goal, now, endless, even,
        least(with_network, goal, 1e6, 1e14) if endless != slow else None,
        _inverse(least(lambda x: with_latency(1 / x), goal, 1e0, 1e12)),
        _whole(least(with_tokens, goal, tokens, tokens * _MOST_TIMES, _TOKEN_STEPS)) if needs_more else None,
        endless != slow,
    )  # fmt: skip


def least(value: Callable[[float], float], goal: float, low: float, high: float, steps: int = _STEPS) -> float | None:
    """The least argument within ``low`` and ``high`` at which ``value``, which never falls, is ``goal``: doubled until
    it is, then ``steps`` halves of the rest. None if that of ``high`` is too small."""
    bottom = top = low
    while value(top) < goal:
        if top >= high:
            return None
        bottom, top = top, min(2 * top, high)
    for _ in range(steps if top > low else 0):
        middle = (bottom + top) / 2
        if value(middle) >= goal:
            top = middle
        else:
            bottom = middle
    return top


def _inverse(rate: float | None) -> float | None:
    return None if rate is None else 1 / rate


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)
