# SPDX-License-Identifier: Apache-2.0
"""How the rows of one stage travel: keys and values to those who need them, their gradients back.

A ``StageComm`` is made once per plan and rank and holds no state of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.hierarchical import HierarchicalLayout, NodeLevels
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.collectives.wire import start_fetch, start_reduce
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.node_exchange import BLOCK_ROWS, NodeExchange
from magi_attention.comm.transport.base import Transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.two_level.phases import two_level_cast
from magi_attention.common.two_level.transfers import plan_transfers

T = TypeVar("T")


class Handle(Generic[T]):
    """An exchange under way; ``wait`` finishes it once and returns its result."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def wait(self) -> T:
        return self._finish()


class QueryComm:
    """Casts of queries to the ranks that hold keys, and what comes back; as ``StageComm``, straight between ranks."""

    def __init__(self, spec: GroupSpec, transport: Transport, made: A2AVLayout | None = None) -> None:
        self.transport = transport
        self._layout = made or A2AVLayout.from_spec(spec)
        self.cache = PlanCache()
        self.cache.include(self._layout.cache)

    def fetch(self, *rows: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Starts the group cast of tensors of local queries; ``wait()`` gives those of the queries received."""
        work, finish = start_fetch(self.transport, self._layout, rows)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return finish()

        return Handle(wait)

    def give_back(
        self, parts: Sequence[torch.Tensor], wire: Sequence[torch.dtype], into: Sequence[torch.Tensor], op: str
    ) -> Handle[None]:
        """Starts the group reduce of ``parts``, of the queries received, in the dtypes of ``wire``. ``wait()`` adds
        them to ``into`` in place, in rank order; with ``op`` "lse" the last of each is the lse that weights the others.
        """
        work, arrived = start_reduce(self.transport, self._layout, parts, wire)

        def wait() -> None:
            work.wait()
            is_lse = op == "lse"
            outputs, lse = (into[:-1], into[-1]) if is_lse else (into, None)
            reduce_arrived(arrived(), outputs, lse, op, acc_reduce=True)

        return Handle(wait)


class StageComm:
    """Group cast and reduce of one stage; ``is_idle`` if no rank of the group receives anything in it.

    By default every row goes straight from its owner to each rank that needs it. With ``hierarchy`` a row crosses
    between nodes once per node, by the ``exchange`` of a call or by all-to-all-v; ``specs`` are then those of all
    ranks. ``made`` is the layout of the direct form, if that was made ahead.

    Plans are checked when they are made, so the direct form leaves the checks of ``group_cast`` out. The caller holds
    the transport's guard and has gradients disabled.
    """

    def __init__(
        self,
        spec: GroupSpec,
        transport: Transport,
        is_idle: bool,
        hierarchy: NodeLevels | None = None,
        specs: Sequence[GroupSpec] = (),
        made: A2AVLayout | None = None,
    ) -> None:
        self.transport, self.is_idle, self.rows = transport, is_idle, spec.output_rows
        self._made = made
        self._spec, self._specs, self._hierarchy = spec, specs, hierarchy
        self._node_exchange: NodeExchange | None = None
        self.cache = PlanCache()

    # Rows are listed when the stage first travels: attention in one launch never asks.

    @cached_property
    def _direct(self) -> A2AVLayout:
        layout = self._made or A2AVLayout.from_spec(self._spec)
        self.cache.include(layout.cache)
        return layout

    @cached_property
    def _levels(self) -> dict[str, Any]:
        """Arguments of ``group_cast`` and ``group_reduce`` with a hierarchy."""
        assert self._hierarchy is not None
        layout = HierarchicalLayout(two_level_cast(self._specs, self._hierarchy.nodes, self._spec.rank))
        self.cache.include(layout.cache)
        return {"layout": layout, "intra_group": self._hierarchy.intra}

    @cached_property
    def _splits(self) -> tuple[list[int], list[int]]:
        return list(self._spec.input_splits), list(self._spec.output_splits)

    @cached_property
    def _ranks(self) -> tuple[list[list[int]], list[int]]:
        return [list(ranks) for ranks in self._spec.dst_indices], list(self._spec.src_index)

    def _exchange(self, group: ExchangeGroup) -> NodeExchange:
        found = self._node_exchange
        if found is None or found.group is not group:
            assert self._hierarchy is not None
            plan = plan_transfers(self._specs, self._hierarchy.nodes, BLOCK_ROWS)
            found = self._node_exchange = NodeExchange(group, plan)
            self.cache.include(found.cache)
        return found

    def fetch(
        self, k: torch.Tensor, v: torch.Tensor, exchange: ExchangeGroup | None = None
    ) -> Handle[list[torch.Tensor]]:
        """Starts the group cast; ``wait()`` gives the stage's (k, v) rows, in receive-buffer order, any strides."""
        if self.is_idle:
            empty = [x.new_empty((self.rows, *x.shape[1:])) for x in (k, v)]
            return Handle(lambda: empty)
        if exchange is not None:
            work, finish = self._exchange(exchange).start_cast((k, v))
        elif self._hierarchy is not None:
            return self._fetch_by_levels(k, v)
        else:
            work, finish = start_fetch(self.transport, self._direct, (k, v))

        def wait() -> list[torch.Tensor]:
            work.wait()
            return finish()

        return Handle(wait)

    def give_back(
        self, dk_stage: torch.Tensor, dv_stage: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, wire: torch.dtype,
        exchange: ExchangeGroup | None = None,
    ) -> Handle[None]:  # fmt: skip
        """Starts the group reduce of the stage's gradients; ``wait()`` adds what arrived to ``dk``, ``dv`` in
        place, in rank order. ``wire`` is the dtype on the wire."""
        if self.is_idle:
            return Handle(lambda: None)
        parts, dtypes = (dk_stage, dv_stage), (wire, wire)
        if exchange is not None:
            work, arrived = self._exchange(exchange).start_reduce(parts, dtypes)
        elif self._hierarchy is not None:
            return self._give_back_by_levels(dk_stage, dv_stage, dk, dv, wire)
        else:
            work, arrived = start_reduce(self.transport, self._direct, parts, dtypes)

        def wait() -> None:
            work.wait()
            reduce_arrived(arrived(), (dk, dv), None, "sum", acc_reduce=True)

        return Handle(wait)

    def _fetch_by_levels(self, k: torch.Tensor, v: torch.Tensor) -> Handle[list[torch.Tensor]]:
        stage = [x.new_empty((self.rows, *x.shape[1:])) for x in (k, v)]
        (held, received), (destinations, sources) = self._splits, self._ranks
        work = group_cast(
            [k, v], stage, held, received, destinations, sources, self.transport, async_op=True, **self._levels
        )
        return Handle(work.wait_post_process)

    def _give_back_by_levels(
        self, dk_stage: torch.Tensor, dv_stage: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, wire: torch.dtype
    ) -> Handle[None]:
        (held, received), (destinations, sources) = self._splits, self._ranks
        work = group_reduce(
            [dk_stage, dv_stage],
            [dk, dv],
            received,
            held,
            sources,
            destinations,
            self.transport,
            async_op=True,
            reduce_op="sum",
            acc_reduce=True,
            comm_dtype=wire,
            **self._levels,
        )
        return Handle(work.wait_post_process)
