# SPDX-License-Identifier: Apache-2.0
"""A log line where the work is out of balance: because of the chunk size, which the published interface fixes, or
because the dispatch was made for another mask."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from magi_attention.config import DistAttnConfig, LocalityDispatchAlg, MinHeapDispatchAlg
from magi_attention.meta.plan import Plan
from magi_attention.meta.solver.partition import min_heap

_log = logging.getLogger("magi_attention.api")
_TOLERATED = 1.1  # the heaviest rank over the mean
_ENOUGH = 1.02
_QUICK = (MinHeapDispatchAlg, LocalityDispatchAlg)  # and never without an answer; others may search for long
_TOLD: set[tuple[int, int]] = set()  # numbers of ranks and chunk sizes of which it was said
_TOLD_OF_OTHERS: set[tuple[int, int]] = set()  # the same of masks on the dispatch of another
_MUCH = 1.25  # as _TOLERATED, of such a mask: layers with it may be few


def advise_balance(plan: Plan, config: DistAttnConfig, build: Callable[..., Plan]) -> str | None:
    """Logs, once for a number of ranks and a chunk size, which chunks would do better; the sentence, if there is one.

    ``build(config=, balance=)`` plans the same mask anew.
    """
    now, told = plan.imbalance, (plan.cp_size, plan.chunk_size)
    if now <= _TOLERATED or told in _TOLD or not isinstance(config.dispatch_config.alg, _QUICK):
        return None
    _TOLD.add(told)
    open_size = replace(config, dispatch_config=replace(config.dispatch_config, chunk_size=None))
    better = build(config=open_size, balance=_ENOUGH)
    if better.chunk_size >= plan.chunk_size or better.imbalance > 1 + 0.5 * (now - 1):
        return None
    text = (
        f"The heaviest of {plan.cp_size} ranks has {now:.2f} times the mean of the work, because chunks of "
        f"{plan.chunk_size:,} tokens are too large for this mask: DispatchConfig(chunk_size={better.chunk_size}) makes "
        f"it {better.imbalance:.2f}. A larger MAGI_ATTENTION_MIN_CHUNKS_PER_RANK makes chunks smaller for all masks."
    )
    _log.warning(text)
    return text


def advise_other_mask(plan: Plan) -> str | None:
    """Logs, once for a number of ranks and a chunk size, that a mask lies badly on a dispatch that was made for
    another; the sentence, if there is one."""
    now, told = plan.imbalance, (plan.cp_size, plan.chunk_size)
    if now <= _MUCH or told in _TOLD_OF_OTHERS:
        return None
    heaviest = min_heap(plan.chunk_areas.tolist(), plan.cp_size)[0]
    best = heaviest * plan.cp_size / max(int(plan.areas.sum()), 1)
    if best > 1 + 0.5 * (now - 1):
        return None
    _TOLD_OF_OTHERS.add(told)
    text = (
        f"The heaviest of {plan.cp_size} ranks has {now:.2f} times the mean of the work of this mask, because its "
        f"tokens were given to ranks for another mask; a dispatch of its own would make it {best:.2f}. Make the "
        "dispatch from the mask with the most work, or with MinHeapDispatchAlg()."
    )
    _log.warning(text)
    return text
