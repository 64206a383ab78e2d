# SPDX-License-Identifier: Apache-2.0
"""A group cast over nodes as two group casts, of which the second stays inside the nodes.

exchange   over the group: a row goes to the ranks of the own node that need it, and once to every other node in which
           a rank needs it, there to the *carrier* of the sender (``Nodes.carrier``)
forward    over a node: the carrier sends the row on to those that need it

The group reduce is the transpose: first the ranks of a node send what they add to a far row to its carrier, which
reduces it in the order of its ranks. Then the owner gets one term from every node, and one from each rank of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.group_spec import GroupSpec, rows_per_source
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.errors import ContractError


@dataclass(frozen=True, eq=False, slots=True)
class TwoLevelCast:
    """The two casts of one rank.

    ``exchange`` counts ranks of the group. Its output, the rows *held*, is the input of ``forward``: what arrives,
    sources ascending, then the rank's own rows for itself. ``forward`` counts ranks of the node, and row i of its
    output is row ``forward_rows[i]`` of the output of the whole cast; together they cover it once.
    """

    nodes: Nodes
    spec: GroupSpec
    exchange: GroupSpec
    forward: GroupSpec
    forward_rows: NDArray[np.int64]

    @property
    def network_rows(self) -> int:
        """Rows that this rank sends to other nodes."""
        node = self.nodes.node_of[self.spec.rank]
        pairs = zip(self.exchange.input_splits, self.exchange.dst_indices)
        return sum(size * sum(self.nodes.node_of[d] != node for d in dsts) for size, dsts in pairs)


def two_level_cast(specs: Sequence[GroupSpec], nodes: Nodes, rank: int) -> TwoLevelCast:
    """The casts of ``rank``; ``specs`` are those of all ranks, in rank order. ``ContractError`` if counts differ."""
    if len(specs) != nodes.world:
        raise ContractError(
            f"There are {len(specs)} specs, and nodes of {nodes.world} ranks; pass one spec per rank of the nodes."
        )
    spec, node, local = specs[rank], nodes.node_of[rank], nodes.local[rank]
    order = [*(s for s in range(nodes.world) if s != rank), rank]
    held = [(size, s, dsts) for s in order for size, dsts in _held(specs[s], nodes, rank)]
    exchange = GroupSpec.make(
        rank,
        nodes.world,
        spec.input_splits,
        [_first_stops(dsts, nodes, rank) for dsts in spec.dst_indices],
        [size for size, _, _ in held],
        [s for _, s, _ in held],
    )
    arriving = rows_per_source(spec)
    # From each rank of the node what it holds for this one, in the order in which it holds it.
    last = [
        (nodes.local[mate], arriving[s])
        for mate in nodes.mates(rank)
        for s in (order if mate == rank else range(nodes.world))
        if arriving[s].size and last_stop(nodes, s, rank) == mate
    ]
    forward = GroupSpec.make(
        local,
        len(nodes.members[node]),
        [size for size, _, _ in held],
        [dsts for _, _, dsts in held],
        [rows.size for _, rows in last],
        [mate for mate, _ in last],
    )
    none = np.zeros(0, np.int64)
    return TwoLevelCast(nodes, spec, exchange, forward, np.concatenate([none, *(rows for _, rows in last)]))


def last_stop(nodes: Nodes, source: int, reader: int) -> int:
    """From which rank of its node a reader has the rows of ``source``: the carrier, or itself if they came straight."""
    node = nodes.node_of[reader]
    return reader if nodes.node_of[source] == node else nodes.carrier(source, node)


def _first_stops(dsts: Sequence[int], nodes: Nodes, source: int) -> list[int]:
    """Where a row of ``source`` for ``dsts`` goes in the exchange."""
    node = nodes.node_of[source]
    return sorted({d if nodes.node_of[d] == node else nodes.carrier(source, nodes.node_of[d]) for d in dsts})


def _held(spec: GroupSpec, nodes: Nodes, rank: int) -> Iterator[tuple[int, list[int]]]:
    """Splits of another rank that ``rank`` holds after the exchange: rows, and who of its node needs them."""
    node, is_near = nodes.node_of[rank], nodes.node_of[spec.rank] == nodes.node_of[rank]
    if not is_near and nodes.carrier(spec.rank, node) != rank:
        return
    for size, dsts in zip(spec.input_splits, spec.dst_indices):
        readers = [rank] if is_near and rank in dsts else []
        if not is_near:
            readers = [d for d in dsts if nodes.node_of[d] == node]
        if readers:
            yield size, [nodes.local[d] for d in readers]
