# SPDX-License-Identifier: Apache-2.0
"""A partition that knows which ranks share a node, where it is better than one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import sum_by
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.config.links import NETWORK_BYTES_PER_S, NVLINK_BYTES_PER_S
from magi_attention.meta.chunking import Cut
from magi_attention.meta.solver.links import LinkLoads, count_links, count_rows
from magi_attention.meta.solver.locality import TOLERATED, Parts, lower_bound, order_of_chunks
from magi_attention.meta.solver.node_fill import fill_nodes, split_evenly
from magi_attention.meta.solver.ownership import owners
from magi_attention.meta.solver.partition import min_heap

Ints = NDArray[np.int64]
Partition = Sequence[Sequence[int]]
_NETWORK_ROW = NVLINK_BYTES_PER_S / NETWORK_BYTES_PER_S  # rows that cross NVLink while one crosses the network
_SLOW = 0.7  # of what the slowest node waits for
_WORTH = 0.9  # of what the slowest rank of a node waits for, if its ranks share out all documents
SHARE_OF_MOST = 0.7  # how much the rank that fetches most counts, against the mean of all


def share(rows: Ints) -> float:
    """What rows of each rank count as: the slowest rank decides, but the others use the same links."""
    return SHARE_OF_MOST * float(rows.max()) + (1 - SHARE_OF_MOST) * float(rows.sum()) / len(rows)


@dataclass(frozen=True, eq=False)
class Unaware:
    """The partition of the same mask that knows of no nodes, which another one has to be better than."""

    cut: Cut
    loads: LinkLoads
    heaviest: int  # area of a rank
    cost: float

    @cached_property
    def most_rows(self) -> int:
        """That a rank may receive: as many as by MinHeap."""
        world = len(self.loads.rows)
        dealt = min_heap(self.cut.work.tolist(), world)[1]
        assert dealt is not None
        return int(count_rows(self.cut, owners(dealt, len(self.cut.bounds)), world).max())


def unaware_of(cut: Cut, nodes: Nodes, partition: Partition, row_cost: float, least_gain: float) -> Unaware | None:
    """What ``partition`` loads on links, or None where nodes can save nothing: each holds one run of chunks, there are
    no documents to keep in one, or rows cost less than ``least_gain`` of all."""
    owner = owners(partition, len(cut.bounds))
    document = cut.document
    if (np.diff(np.array(nodes.node_of)[owner]) >= 0).all() or (document == document[0]).all():
        return None
    loads = count_links(cut, owner, nodes)
    cost = _cost(cut, nodes, owner, loads, row_cost)
    if (1 - least_gain) * cost <= lower_bound(cut.work, nodes.world):
        return None
    return Unaware(cut, loads, int(sum_by(owner, cut.work, nodes.world).max()), cost)


def by_nodes(
    cut: Cut, nodes: Nodes, unaware: Unaware, row_cost: float, least_gain: float
) -> tuple[Partition | None, bool]:
    """A partition that puts fewer rows on the network than ``unaware``, which may be of longer chunks; None if none was
    found. And whether ranks could share the chunks of their nodes: where they could not, shorter ones may help.

    No rank of it is more than ``TOLERATED`` above the least area, or else heavier than the heaviest of ``unaware``, and
    none receives more rows than by that or by MinHeap. All ranks together receive no more rows; fewer of them cross the
    network if each goes to a node once, and no more if each goes straight to every rank. It saves ``least_gain`` of the
    modelled cost, in which a row costs ``row_cost`` in a node and more on the network.
    """
    before, limit = unaware.loads, max(int(TOLERATED * lower_bound(cut.work, nodes.world)), unaware.heaviest)
    is_shared = False
    for is_coarse in (True, False):
        order = order_of_chunks(cut.document, cut.work, is_coarse)
        parts = fill_nodes(cut.work, order, cut.document, nodes.members, limit)
        if parts is None:
            continue
        is_shared = True
        best: Partition | None = None
        least = (1 - least_gain) * unaware.cost
        for found, owner, links in _both(cut, nodes, parts, before, limit):
            is_allowed = (
                links.rows.sum() <= before.rows.sum()
                and links.straight <= before.straight
                and (links.rows.max() <= before.rows.max() or links.rows.max() <= unaware.most_rows)
            )
            cost = _cost(cut, nodes, owner, links, row_cost)
            if is_allowed and cost < least:
                best, least = found, cost
        if best is not None:
            return best, True
    return None, is_shared


def _both(
    cut: Cut, nodes: Nodes, parts: Parts, before: LinkLoads, limit: int
) -> Iterator[tuple[Parts, Ints, LinkLoads]]:
    """``parts``, and if it is another partition what ``_spread`` makes of it, with the ranks of chunks and the loads;
    neither where no fewer rows cross the network than ``before``."""
    owner = owners(parts, len(cut.bounds))
    links = count_links(cut, owner, nodes)
    if links.crossing >= before.crossing:
        return
    yield parts, owner, links
    spread = _spread(cut, nodes, parts, owner, links, int(before.rows.sum()), limit)
    if spread is not None:
        yield spread


def _cost(cut: Cut, nodes: Nodes, owner: Ints, links: LinkLoads, row_cost: float) -> float:
    heaviest = int(sum_by(owner, cut.work, nodes.world).max())
    in_node, network = _link_rows(links, owner, nodes)
    return heaviest + row_cost * max(share(in_node), _NETWORK_ROW * share(network))  # both at the same time


def _link_rows(links: LinkLoads, owner: Ints, nodes: Nodes) -> tuple[Ints, Ints]:
    """(ranks,) each: rows that a rank sends or receives in its node, and over the network, the larger number of both.
    What comes from other nodes, and goes on to the ranks that need it, the ranks of a node do in equal shares."""
    node_of, sizes = np.array(nodes.node_of), np.array([len(ranks) for ranks in nodes.members])
    to_mates, leaving = (sum_by(owner, rows, nodes.world) for rows in (links.to_mates, links.leaving))
    passed_on = sum_by(node_of, links.rows - to_mates, len(sizes)) - links.entering
    in_node = np.maximum(links.rows, to_mates + (passed_on // sizes)[node_of])
    return in_node, np.maximum((links.entering // sizes)[node_of], leaving)


def _spread(
    cut: Cut, nodes: Nodes, parts: Parts, owner: Ints, links: LinkLoads, most: int, limit: int
) -> tuple[Parts, Ints, LinkLoads] | None:
    """``parts`` with other ranks of the same node for chunks, where one rank sends far more than others over the
    network: from the slowest node on, while all ranks receive no more than ``most`` rows. With the ranks of its chunks
    and its loads, or None where it is ``parts``. ``owner`` (chunks,): ranks of chunks."""
    found, even, given = list(parts), list(parts), owner
    now = _node_costs(links, owner, nodes)
    slow = [node for node in np.argsort(-now, kind="stable").tolist() if now[node] > _SLOW * now.max()]
    for node in slow:
        ranks = nodes.members[node]
        chunks = np.sort(np.concatenate([parts[rank] for rank in ranks]))
        for rank, part in zip(ranks, split_evenly(chunks, cut.work, len(ranks), limit) or [parts[r] for r in ranks]):
            even[rank] = part
    owner = owners(even, len(cut.bounds))
    evened = count_links(cut, owner, nodes, links)
    then = _node_costs(evened, owner, nodes)
    total, is_spread = int(links.rows.sum()), np.zeros(len(nodes.members), dtype=np.bool_)
    for node in slow:
        more = int((evened.rows - links.rows)[list(nodes.members[node])].sum())
        if then[node] < _WORTH * now[node] and total + more <= most:
            total += more
            is_spread[node] = True
            for rank in nodes.members[node]:
                found[rank] = even[rank]
    if not is_spread.any():
        return None
    # What a rank receives and sends to its node depends on the chunks of that node alone.
    of_rank = is_spread[np.array(nodes.node_of)]
    rows = np.where(of_rank, evened.rows, links.rows)
    to_mates = np.where(of_rank[owner], evened.to_mates, links.to_mates)
    return found, np.where(of_rank[given], owner, given), LinkLoads(rows, to_mates, links.entering, links.leaving)


def _node_costs(links: LinkLoads, owner: Ints, nodes: Nodes) -> NDArray[np.float64]:
    """(nodes,): what the slowest rank of each waits for."""
    in_node, network = _link_rows(links, owner, nodes)
    slowest = np.zeros(len(nodes.members))
    np.maximum.at(slowest, np.array(nodes.node_of), np.maximum(in_node, _NETWORK_ROW * network))
    return slowest
