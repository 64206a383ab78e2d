# SPDX-License-Identifier: Apache-2.0
"""Rows of keys by the link that they travel on, counted for chunks of which only the owner is known: without a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import sum_by
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.meta.chunking import Cut
from magi_attention.meta.solver.ownership import remote_keys

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """``rows`` (ranks,) that each rank receives, over any link; ``to_mates`` (chunks,) those that the owner of each
    chunk sends to ranks of its node.

    If a row goes once to every node that needs it, ``entering`` (nodes,) are the rows that each node receives over the
    network and ``leaving`` (chunks,) those that the owner of each chunk sends there.
    """

    rows: Ints
    to_mates: Ints
    entering: Ints
    leaving: Ints

    @property
    def crossing(self) -> int:
        """Rows that cross the network if each goes once to every node that needs it."""
        return int(self.entering.sum())

    @property
    def straight(self) -> int:
        """Rows that cross it if each goes straight to every rank that needs it."""
        return int(self.rows.sum()) - int(self.to_mates.sum())


def count_rows(cut: Cut, owner: Ints, world: int) -> Ints:
    """(world,): rows of keys that each rank receives. ``owner`` (chunks,) is the rank of each chunk."""
    keys, chunk_of = cut.keys
    ranges, ranks = remote_keys(keys, owner[chunk_of], cut.bounds, owner)
    return sum_by(ranks, ranges[:, 1] - ranges[:, 0], world)


def count_links(cut: Cut, owner: Ints, nodes: Nodes, alike: LinkLoads | None = None) -> LinkLoads:
    """``owner`` (chunks,) is the rank of each chunk. ``alike``: loads of a partition whose nodes have the same chunks,
    and so put the same rows on the network."""
    (keys, chunk_of), bounds = cut.keys, cut.bounds
    node_of = np.array(nodes.node_of, dtype=np.int64)
    home, stride = node_of[owner], int(bounds[-1, 1]) + 1  # so chunks of two nodes do not touch
    ranges, ranks = remote_keys(keys, owner[chunk_of], bounds, owner)
    # By a radix sort, which is stable and which numpy has for short integers.
    order = np.argsort(home.astype(np.min_scalar_type(len(nodes.members))), kind="stable")
    to_mates = np.empty(len(bounds), dtype=np.int64)
    held = (bounds + (home * stride)[:, None])[order]
    to_mates[order] = _rows_by_chunk(ranges + (node_of[ranks] * stride)[:, None], held)
    rows = sum_by(ranks, ranges[:, 1] - ranges[:, 0], nodes.world)
    if alike is not None:
        return LinkLoads(rows, to_mates, alike.entering, alike.leaving)
    wanted, into = remote_keys(keys, home[chunk_of], bounds, home)
    entering = sum_by(into, wanted[:, 1] - wanted[:, 0], len(nodes.members))
    return LinkLoads(rows, to_mates, entering, _rows_by_chunk(wanted, bounds))


def _rows_by_chunk(ranges: Ints, bounds: Ints) -> Ints:
    """(chunks,): rows of each chunk in ``ranges``, counted once for every range. ``bounds`` ascend, with gaps maybe."""
    first = np.searchsorted(bounds[:, 1], ranges[:, 0], side="right")
    last = np.searchsorted(bounds[:, 0], ranges[:, 1], side="left") - 1
    meets = first <= last
    ranges, first, last = ranges[meets], first[meets], last[meets]
    edges = np.zeros(len(bounds) + 1, dtype=np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last + 1, -1)
    rows: Ints = np.cumsum(edges)[:-1] * (bounds[:, 1] - bounds[:, 0])
    np.subtract.at(rows, first, np.maximum(ranges[:, 0] - bounds[first, 0], 0))
    np.subtract.at(rows, last, np.maximum(bounds[last, 1] - ranges[:, 1], 0))
    return rows
