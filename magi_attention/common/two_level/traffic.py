# SPDX-License-Identifier: Apache-2.0
"""Rows of group casts by the kind of link that they travel on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes


@dataclass(frozen=True, eq=False, slots=True)
class LinkRows:
    """Rows that each rank receives, ``(world,)``: over the network, and from ranks of its node."""

    network: NDArray[np.int64]
    node: NDArray[np.int64]


def direct_rows(specs: Sequence[GroupSpec], nodes: Nodes) -> LinkRows:
    """Every row goes straight to each rank that needs it."""
    found = LinkRows(np.zeros(nodes.world, np.int64), np.zeros(nodes.world, np.int64))
    for spec in specs:
        for size, dsts in zip(spec.input_splits, spec.dst_indices):
            for reader in dsts:
                _count(found, nodes, spec.rank, reader, size)
    return found


def two_level_rows(specs: Sequence[GroupSpec], nodes: Nodes) -> LinkRows:
    """A row goes once to every other node in which a rank needs it, and from its carrier there to the others.

    No plan in which rows travel whole, and only ranks that hold them send, can put fewer on the network: each node gets
    what its ranks need, and nothing else.
    """
    found = LinkRows(np.zeros(nodes.world, np.int64), np.zeros(nodes.world, np.int64))
    for spec in specs:
        home = nodes.node_of[spec.rank]
        for size, dsts in zip(spec.input_splits, spec.dst_indices):
            for node in {nodes.node_of[reader] for reader in dsts} - {home}:
                _count(found, nodes, spec.rank, nodes.carrier(spec.rank, node), size)
            for reader in dsts:
                node = nodes.node_of[reader]
                _count(found, nodes, spec.rank if node == home else nodes.carrier(spec.rank, node), reader, size)
    return found


def _count(found: LinkRows, nodes: Nodes, sender: int, reader: int, rows: int) -> None:
    if sender != reader:
        is_near = nodes.node_of[sender] == nodes.node_of[reader]
        (found.node if is_near else found.network)[reader] += rows
