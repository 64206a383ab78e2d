# SPDX-License-Identifier: Apache-2.0
"""Group cast and reduce in two levels: a row that several ranks of one node need goes there only once.

Rank = node * node_size + local rank. ``inter`` joins the equal local ranks of all nodes, ``intra`` the ranks
of one node. A cast has three exchanges:

local    rows for ranks of the own node, within the node
inter    each row once to every other node that needs it, to the rank with the sender's local rank
forward  from there to the ranks that need it, within the node

*local* and *inter* run at once; *forward* follows *inter*, on CUDA without the host waiting. The reduce runs
the other way: partial sums are formed in the node, and one row per node crosses the network.

On CPU the last exchange starts when the handle is waited for, so all ranks must wait in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.comm.collectives.layout import A2AVLayout, Rows, rows_per_rank
from magi_attention.comm.collectives.reduce import accumulation_dtype
from magi_attention.comm.collectives.wire import Finish, start_cast, start_reduce
from magi_attention.comm.transport.base import Transport, Work
from magi_attention.comm.transport.streams import SideStream, behind_current, wait_for
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.plan_cache import PlanCache
from magi_attention.errors import ContractError


@dataclass(frozen=True, eq=False, slots=True)
class HierarchicalPhases:
    """The three exchanges of one rank. ``local`` and ``forward`` are over the node, ``inter`` over the nodes.

    The output of ``inter`` is the input of ``forward``. ``local_rows[i]`` and ``forward_rows[i]`` are the
    rows of the real output that row i of those exchanges' outputs stands for; together they cover it once.
    """

    rank: int
    world: int
    input_rows: int
    output_rows: int
    local: GroupSpec
    local_rows: np.ndarray
    inter: GroupSpec
    forward: GroupSpec
    forward_rows: np.ndarray


def split_hierarchical(specs: Sequence[GroupSpec], inter: int, intra: int) -> list[HierarchicalPhases]:
    """The phases of all ranks for the group cast given by the specs of all ranks, in rank order."""
    return [hierarchical_phases(specs, inter, intra, rank) for rank in range(len(specs))]


def hierarchical_phases(specs: Sequence[GroupSpec], inter: int, intra: int, rank: int) -> HierarchicalPhases:
    """The phases of ``rank`` on ``inter`` nodes of ``intra`` ranks; ``specs`` are those of all ranks."""
    if len(specs) != inter * intra:
        raise ContractError(
            f"{len(specs)} ranks are not {inter} nodes of {intra}; pass one spec per rank and the shape of "
            "the device mesh."
        )
    spec = specs[rank]
    node, local = divmod(rank, intra)
    arriving = rows_per_rank(spec.output_splits, [(s,) for s in spec.src_index], spec.world)

    def in_node(dsts: Sequence[int]) -> list[int]:
        return [d % intra for d in dsts if d // intra == node]

    neighbours = [node * intra + i for i in range(intra)]
    local_spec = GroupSpec.make(
        local,
        intra,
        spec.input_splits,
        [in_node(dsts) for dsts in spec.dst_indices],
        [arriving[s].size for s in neighbours],
        range(intra),
    )
    # a split that this rank carries for its node: (size, source node, local ranks that need it)
    carried = [
        (size, m, in_node(dsts))
        for m in range(inter)
        if m != node
        for size, dsts in zip(specs[m * intra + local].input_splits, specs[m * intra + local].dst_indices)
        if in_node(dsts)
    ]
    inter_spec = GroupSpec.make(
        node,
        inter,
        spec.input_splits,
        [sorted({d // intra for d in dsts} - {node}) for dsts in spec.dst_indices],
        [size for size, _, _ in carried],
        [m for _, m, _ in carried],
    )
    far = [(i, m * intra + i) for i in range(intra) for m in range(inter) if m != node]
    forward_spec = GroupSpec.make(
        local,
        intra,
        [size for size, _, _ in carried],
        [dsts for _, _, dsts in carried],
        [arriving[s].size for _, s in far],
        [i for i, _ in far],
    )
    none = np.zeros(0, np.int64)
    return HierarchicalPhases(
        rank,
        spec.world,
        spec.input_rows,
        spec.output_rows,
        local_spec,
        np.concatenate([none, *[arriving[s] for s in neighbours]]),
        inter_spec,
        forward_spec,
        np.concatenate([none, *[arriving[s] for _, s in far]]),
    )


class HierarchicalLayout:
    """Row indices of the three exchanges of one rank; the counterpart of ``A2AVLayout``."""

    def __init__(self, phases: HierarchicalPhases):
        self.rank, self.world = phases.rank, phases.world
        self.input_rows, self.output_rows = phases.input_rows, phases.output_rows
        self.local = A2AVLayout.from_spec(phases.local, phases.local_rows, phases.output_rows)
        self.inter = A2AVLayout.from_spec(phases.inter)
        self.forward = A2AVLayout.from_spec(phases.forward, phases.forward_rows, phases.output_rows)
        self.side_stream = SideStream()
        self.cache = PlanCache()
        self.cache.include(self.local.cache, self.inter.cache, self.forward.cache)

    @property
    def network_rows(self) -> int:
        """Rows that this rank puts on the network between nodes in a cast."""
        return self.inter.send.count


def gather_hierarchical_layout(
    transport: Transport, spec: GroupSpec, inter: Transport, intra: Transport
) -> HierarchicalLayout:
    """Collects the specs of all ranks and makes the layout of this one. Blocks the host; keep the result."""
    if inter.size * intra.size != transport.size or inter.rank * intra.size + intra.rank != transport.rank:
        raise ContractError(
            f"Rank {transport.rank} of {transport.size} is not rank {inter.rank} of {inter.size} nodes times "
            f"local rank {intra.rank} of {intra.size}; the rank must be node * node_size + local rank."
        )
    specs = transport.all_gather_object(spec)
    return HierarchicalLayout(hierarchical_phases(specs, inter.size, intra.size, transport.rank))


class _TwoSteps:
    """``first``, then the operation that ``then`` starts. With a stream, ``then`` runs on it at once, ordered
    after ``first`` by the device; without, at the first ``wait``."""

    def __init__(
        self, first: Work, then: Callable[[], tuple[Work, Callable]], stream: torch.cuda.Stream | None
    ):
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
    inter: Transport,
    intra: Transport,
    layout: HierarchicalLayout,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> tuple[list[Work], Finish]:
    """As ``start_cast``, over two levels."""
    carried = [x.new_empty((layout.inter.output_rows, *x.shape[1:])) for x in inputs]
    inter_work, inter_finish = start_cast(inter, layout.inter, inputs, carried)
    local_work, local_finish = start_cast(intra, layout.local, inputs, outputs)

    def forward() -> tuple[Work, Finish]:
        inter_finish()
        return start_cast(intra, layout.forward, carried, outputs)

    chain = _TwoSteps(inter_work, forward, layout.side_stream.on(inputs[0].device))

    def finish() -> None:
        local_finish()
        chain.result()

    return [local_work, chain], finish


def start_hierarchical_reduce(
    inter: Transport,
    intra: Transport,
    layout: HierarchicalLayout,
    inputs: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
) -> tuple[list[Work], Callable[[], list[tuple[Rows, list[torch.Tensor]]]]]:
    """As ``start_reduce``, over two levels; sums only. Contributions of the own node come first, then those
    of the other nodes, each already summed over the node in at least float32."""
    node_work, node_parts = start_reduce(intra, layout.forward, inputs, dtypes)
    local_work, local_parts = start_reduce(intra, layout.local, inputs, dtypes)

    def cross() -> tuple[Work, Callable]:
        sums = [
            x.new_zeros((layout.inter.output_rows, *x.shape[1:]), dtype=accumulation_dtype(dtype))
            for x, dtype in zip(inputs, dtypes)
        ]
        for rows, parts in node_parts().segments():
            for total, part in zip(sums, parts):
                rows.add(total, part)
        return start_reduce(inter, layout.inter, sums, dtypes)

    chain = _TwoSteps(node_work, cross, layout.side_stream.on(inputs[0].device))

    def contributions() -> list[tuple[Rows, list[torch.Tensor]]]:
        return [*local_parts().segments(), *chain.result().segments()]

    return [local_work, chain], contributions
