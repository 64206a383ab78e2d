# SPDX-License-Identifier: Apache-2.0
"""How a plan runs in one launch, or why it does not; alike on all ranks."""

from __future__ import annotations

import logging

import torch

from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.symm.buffers import why_no_kernels_beside, why_no_symm_buffers
from magi_attention.comm.transport.base import Transport
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.functional.one_launch.base import OneLaunch
from magi_attention.functional.one_launch.nodes import NodeFusedAttention
from magi_attention.functional.one_launch.nvlink import FusedAttention
from magi_attention.meta.plan import Plan

_log = logging.getLogger("magi_attention.functional")
Choice = tuple[OneLaunch | None, str]  # attention in one launch, or None and a sentence


def over_nvlink(plan: Plan, transport: Transport, high_precision_reduce: bool, by_wish: bool) -> Choice:
    """In one NVLink domain. ``by_wish``: it was asked for, so nothing is passed over because it would be slow."""
    reason = why_no_symm_buffers(transport, by_wish=by_wish)
    if reason is not None:
        return None, reason
    return FusedAttention(plan, transport, high_precision_reduce), ""


def over_nodes(
    plan: Plan, transport: Transport, nodes: Nodes, wish: str, high_precision_reduce: bool, device: torch.device
) -> Choice:
    """Where rows go between nodes by one-sided transfers; ``wish`` is one of ``NODE_TRANSPORTS``. Collective at the
    first call for a group."""
    if len(nodes.members) < 2:
        return None, "Hierarchical communication was asked for, and all ranks are on one node."
    if not all(map(len, plan.partitions)):
        return None, "Some rank has no tokens."
    reason = why_no_kernels_beside(transport)
    if reason is not None:
        return None, reason
    group = exchange_group(transport, nodes, device, wish)
    if group is None:
        return None, "Rows go between nodes by all-to-all-v."
    _log.info("Attention runs in one launch over %d nodes, by %s.", len(nodes.members), group.verbs.name)
    return NodeFusedAttention(plan, group, high_precision_reduce), ""
