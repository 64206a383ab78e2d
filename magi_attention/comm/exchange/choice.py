# SPDX-License-Identifier: Apache-2.0
"""By what rows of a group travel between nodes: one-sided transfers if all ranks can, all-to-all-v otherwise.

The ranks vote once for a group. All of them hear all votes, so no rank decides alone, and the choice and its reason go
to the log. Nobody tries again later.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.verbs import FACTORY, GinFactory, NvshmemFactory, Verbs, VerbsFactory
from magi_attention.comm.transport.base import Transport, TransportBase
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.errors import MagiError, UnsupportedError

NODE_TRANSPORTS = ("auto", "nvshmem", "gin", "all_to_all")
_log = logging.getLogger("magi_attention.comm")


@dataclass(frozen=True)
class _Choice:
    """``group``, or the sentence why there is none."""

    group: ExchangeGroup | None
    reason: str = ""


def exchange_group(transport: Transport, nodes: Nodes, device: torch.device, wish: str) -> ExchangeGroup | None:
    """What moves rows of this group between nodes by one-sided transfers; None for all-to-all-v.

    Args:
        nodes: of the ranks of the group.
        wish: one of ``NODE_TRANSPORTS``, the same on all ranks. "auto" tries NVSHMEM, then GIN; "nvshmem" and "gin"
            make a group that cannot an error; "all_to_all" asks nobody.
    Raises:
        UnsupportedError: on all ranks, if they were to use a transport and one of them cannot.
    Collective at the first call for a group, a kind of device and a transport.
    """
    if len(nodes.members) < 2 or wish == "all_to_all":
        return None
    kept = transport.kept if isinstance(transport, TransportBase) else {}
    key = ("exchange over nodes", device.type, nodes)
    choices: dict[str, _Choice] = kept.setdefault(key, {})
    candidates = _candidates(kept.get(FACTORY), wish)
    for factory in candidates:
        if factory.name not in choices:
            choices[factory.name] = _vote(transport, nodes, device, factory)
        if choices[factory.name].group is not None:
            return choices[factory.name].group
    reasons = " ".join(choices[factory.name].reason for factory in candidates)
    if wish != "auto":
        raise UnsupportedError(
            f"MAGI_ATTENTION_NODE_TRANSPORT={wish} cannot be done here: {reasons} Unset it, and rows go between nodes "
            "by all-to-all-v."
        )
    if not kept.setdefault((*key, "said"), False):
        kept[(*key, "said")] = True
        _log.info("Rows of this group go between nodes by all-to-all-v: %s", reasons)
    return None


def _candidates(given: VerbsFactory | None, wish: str) -> list[VerbsFactory]:
    if given is not None:
        return [given]
    made: dict[str, type[NvshmemFactory] | type[GinFactory]] = {"nvshmem": NvshmemFactory, "gin": GinFactory}
    return [make() for name, make in made.items() if wish in ("auto", name)]


def _vote(transport: Transport, nodes: Nodes, device: torch.device, factory: VerbsFactory) -> _Choice:
    if not isinstance(transport, TransportBase):
        return _Choice(None, "The group does not speak through torch.distributed.")
    lack = factory.why_not(transport, device)
    votes: list[tuple[str | None, str]] = transport.all_gather_object((lack, factory.version))
    versions = [version for _, version in votes]
    reason = _first([lack for lack, _ in votes], nodes)
    if reason is None and len(set(versions)) > 1:
        other = next(rank for rank, version in enumerate(versions) if version != versions[0])
        reason = (
            f"Rank 0 (node {nodes.node_of[0]}) has {factory.name} {versions[0]}, and rank {other} (node "
            f"{nodes.node_of[other]}) has {versions[other]}; install the same on all nodes."
        )
    if reason is not None:
        return _Choice(None, reason)
    verbs: Verbs | None = None
    error = None
    try:
        verbs = factory.join(transport, device)
    except (MagiError, RuntimeError) as exc:
        error = f"{factory.name} did not join: {exc}"
    reason = _first(transport.all_gather_object(error), nodes)
    if reason is not None or verbs is None:
        return _Choice(None, reason or "")
    _log.info(
        "Rows of this group go between %d nodes by %s %s, on all %d ranks.",
        len(nodes.members), factory.name, factory.version, transport.size,
    )  # fmt: skip
    return _Choice(ExchangeGroup(transport, nodes, verbs, device))


def _first(lacks: list[str | None], nodes: Nodes) -> str | None:
    """The sentence of the first rank that lacks something."""
    for rank, lack in enumerate(lacks):
        if lack is not None:
            return f"On rank {rank} (node {nodes.node_of[rank]}) {lack.rstrip('. ')}."
    return None
