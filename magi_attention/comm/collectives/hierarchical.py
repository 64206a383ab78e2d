# SPDX-License-Identifier: Apache-2.0
"""Group cast and reduce in two levels: a row that several ranks of one node need goes there only once.

``common/two_level/phases.py`` has the two casts of which a cast consists: the *exchange* over the group, and the
*forward* inside the nodes. On CUDA the second follows the first without the host waiting. The reduce runs the other
way: the ranks of a node reduce what they have for a far row, in their order and in at least float32, and one row per
node crosses the network. Both orders are fixed, so a reduce gives the same bits on every run. They differ from those of
the direct form, by rounding.

On CPU the second part starts when the handle is waited for, so all ranks must wait in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.collectives.reduce import accumulation_dtype, reduce_arrived
from magi_attention.comm.collectives.wire import Arrived, Finish, start_cast, start_fetch, start_reduce
from magi_attention.comm.transport.base import AllToAll, Transport, TransportBase, Work
from magi_attention.comm.transport.part import PartTransport
from magi_attention.comm.transport.streams import SideStream, behind_current, wait_for
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.phases import TwoLevelCast, two_level_cast
from magi_attention.errors import ContractError


@dataclass(frozen=True, eq=False)
class NodeLevels:
    """The nodes of a group of ranks, and the group of the ranks of this one's node, in the same order.

    Where there is no process group of a node, ``intra`` is a ``PartTransport``: rows inside the nodes then follow
    those between nodes on one communicator, while a group of their own would let them travel at the same time.
    """

    nodes: Nodes
    intra: AllToAll


class HierarchicalLayout:
    """Row indices of the two casts of one rank; the counterpart of ``A2AVLayout``."""

    def __init__(self, cast: TwoLevelCast):
        spec = cast.spec
        self.rank, self.world = spec.rank, spec.world
        self.input_rows, self.output_rows = spec.input_rows, spec.output_rows
        self.network_rows = cast.network_rows
        readers = np.repeat([len(dsts) for dsts in spec.dst_indices], spec.input_splits).astype(np.int64)
        self.exchange = A2AVLayout.from_spec(cast.exchange, num_contributions=readers)
        self.forward = A2AVLayout.from_spec(cast.forward, cast.forward_rows, spec.output_rows)
        self.side_stream = SideStream()
        self.cache = PlanCache()
        self.cache.include(self.exchange.cache, self.forward.cache)


def gather_hierarchical_layout(transport: Transport, spec: GroupSpec, intra: AllToAll) -> HierarchicalLayout:
    """Collects the specs of all ranks and makes the layout of this one. Blocks the host; keep the result.

    ``intra`` is the group of the ranks of this one's node. ``ContractError`` on all ranks if these groups do not divide
    the ranks of ``transport``, each in the order of its ranks there.
    """
    gathered = transport.all_gather_object((spec, tuple(intra.ranks)))
    nodes = Nodes.of([ranks for _, ranks in gathered])
    for rank, (_, ranks) in enumerate(gathered):
        if tuple(transport.ranks[mate] for mate in nodes.mates(rank)) != ranks:
            raise ContractError(
                f"The intra_group of rank {rank} has the global ranks {list(ranks)}; the groups must divide the ranks "
                f"{list(transport.ranks)} of the group, each in their order."
            )
    return HierarchicalLayout(two_level_cast([spec for spec, _ in gathered], nodes, transport.rank))


def join_nodes(transport: Transport, sizes: Sequence[int], launcher_node: int | None) -> NodeLevels:
    """The nodes of a group, and this rank's. Collective at the first call for a group.

    Args:
        sizes: ranks per node as ``Nodes.of_sizes`` takes them; where they are empty ``launcher_node`` counts,
            the number of this process's node.
    Raises:
        ContractError: some rank knows neither, or ranks were told different sizes.
    """
    known = transport.kept if isinstance(transport, TransportBase) else {}
    key = ("nodes", tuple(sizes))
    if key not in known:
        told = transport.all_gather_object((tuple(sizes), launcher_node))
        if len({sizes for sizes, _ in told}) > 1:
            raise ContractError(
                f"Ranks were told different node sizes: {[list(sizes) for sizes, _ in told]}; set "
                "MAGI_ATTENTION_NODE_SIZE to the same on all."
            )
        unknown = [rank for rank, (sizes, node) in enumerate(told) if not sizes and node is None]
        if unknown:
            raise ContractError(
                f"On rank {unknown[0]} nothing says on which node it is; set MAGI_ATTENTION_NODE_SIZE, start the "
                "ranks by torchrun, or pass a 2-D DeviceMesh (inter-node, intra-node)."
            )
        nodes = Nodes.of_sizes(sizes, transport.ranks) if sizes else Nodes.of([node for _, node in told])
        known[key] = NodeLevels(nodes, PartTransport(transport, nodes.mates(transport.rank)))
    return known[key]


class _TwoSteps:
    """``first``, then the operation that ``then`` starts. With a stream, ``then`` runs on it at once, ordered
    after ``first`` by the device; without, at the first ``wait``."""

    def __init__(self, first: Work, then: Callable[[], tuple[Work, Callable]], stream: torch.cuda.Stream | None):
        self._first, self._then, self._stream = first, then, stream
        self._second: Work | None = None
        self.result: Callable = lambda: None
        if stream is not None:
            with behind_current(stream):
                self._advance()

    def _advance(self) -> Work:
        self._first.wait()
        self._second, self.result = self._then()
        return self._second

    def wait(self) -> None:
        second = self._second or self._advance()
        if self._stream is not None:
            wait_for(self._stream)
        second.wait()

    def is_completed(self) -> bool:
        return self._second is not None and self._second.is_completed()


def start_hierarchical_cast(
    transport: Transport, intra: AllToAll, layout: HierarchicalLayout, inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> tuple[Work, Finish]:  # fmt: skip
    """As ``start_cast``, over two levels."""
    work, held = start_fetch(transport, layout.exchange, inputs)

    def forward() -> tuple[Work, Finish]:
        return start_cast(intra, layout.forward, held(), outputs)

    chain = _TwoSteps(work, forward, layout.side_stream.on(inputs[0].device))
    return chain, lambda: chain.result()


def start_hierarchical_reduce(
    transport: Transport, intra: AllToAll, layout: HierarchicalLayout, inputs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype], reduce_op: str,
) -> tuple[Work, Callable[[], Arrived]]:  # fmt: skip
    """As ``start_reduce``, over two levels. With "lse" the last input is the lse that weights the others."""
    node_work, node_parts = start_reduce(intra, layout.forward, inputs, dtypes)

    def cross() -> tuple[Work, Callable[[], Arrived]]:
        held = [
            x.new_empty((layout.exchange.output_rows, *x.shape[1:]), dtype=accumulation_dtype(dtype))
            for x, dtype in zip(inputs, dtypes)
        ]
        is_lse = reduce_op == "lse"
        # why not "avg" here: only the owner knows of how many terms the mean is
        node_op = "lse" if is_lse else "sum"
        outputs, lse = (held[:-1], held[-1]) if is_lse else (held, None)
        reduce_arrived(node_parts(), outputs, lse, node_op, acc_reduce=False)
        return start_reduce(transport, layout.exchange, held, dtypes)

    chain = _TwoSteps(node_work, cross, layout.side_stream.on(inputs[0].device))
    return chain, lambda: chain.result()
