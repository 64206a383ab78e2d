# SPDX-License-Identifier: Apache-2.0
"""``ExchangeGroup``: the memory that the ranks of one group share for exchanges over nodes, and who failed in it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from magi_attention.comm.exchange.arena import Arena
from magi_attention.comm.exchange.verbs import Verbs
from magi_attention.comm.transport.base import TransportBase
from magi_attention.comm.transport.streams import OrderedStream, OrderedStreams
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.native.comm import abi as comm_abi


class ExchangeGroup:
    """One arena for all plans, which grows when a plan needs more, and never shrinks before the group is destroyed.

    Exchanges of a group follow one another, on whatever stream they are. ``held_bytes`` are those of the arena now, and
    0 when it has been given back.
    """

    def __init__(self, transport: TransportBase, nodes: Nodes, verbs: Verbs, device: torch.device) -> None:
        self.rank, self.world = transport.rank, transport.size
        self.nodes, self.verbs, self.device = nodes, verbs, device
        self.timeout_ms = min(int(transport.timeout_s * 1000), 2**31 - 1)
        self.arena = Arena(self.world)
        self.held_bytes = 0
        self._is_closed = False
        self._memory: torch.Tensor | None = None
        self._transport = transport.reference()  # why weak: the memory goes with the group
        self._ordered_streams = OrderedStreams(device) if device.type == "cuda" else None
        # Host memory that kernels write: what they find out must be known without waiting for them.
        self._failed_peer = torch.zeros(1 + self.world, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._failed_peer_view = self._failed_peer.numpy()
        self._stage, self._told = "the first call", ""
        transport.watch(self)
        transport.at_end(self.close)

    # -- memory ---------------------------------------------------------------------------------------------------
    @property
    def memory(self) -> torch.Tensor:
        """The arena, (bytes,) uint8."""
        assert self._memory is not None, "reserve comes first"
        return self._memory

    def reserve(self, room: Arena) -> Arena:
        """The layout with ``room``, the same on all ranks; collective where the memory must grow, for which all ranks
        wait. What was prepared for another layout is void then. ``ContractError`` if the group was destroyed."""
        if self._is_closed:
            raise ContractError("The memory of this group was given back with it; go on with a group that exists.")
        if self._memory is None or self.arena != self.arena.joined(room):
            self._grow(self.arena.joined(room))
        return self.arena

    def _grow(self, arena: Arena) -> None:
        stage = "making room for an exchange over nodes"
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise ContractError(
                    "The memory of an exchange over nodes must grow, which cannot be done while a CUDA graph is "
                    "captured; run the call once before the capture."
                )
            torch.cuda.synchronize(self.device)  # exchanges that still use the old one, on this rank ...
        self.check(stage)
        self._meet(stage)  # ... and on the others
        self._free()  # first, so that both need not fit
        self._memory = self.verbs.alloc(arena.num_bytes)
        self.held_bytes, self.arena = arena.num_bytes, arena
        self._meet(stage)  # nobody writes before all words are 0

    def close(self) -> None:
        """Gives the memory back; collective, when the group has been destroyed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._is_closed = True
        self._free()
        self.verbs.leave()

    def _free(self) -> None:
        if self._memory is not None:
            self.verbs.free(self._memory)
            self._memory, self.held_bytes, self.arena = None, 0, Arena(self.world)

    def _meet(self, stage: str) -> None:
        transport = self._transport()
        if transport is None:
            raise ContractError("The process group of this exchange was destroyed; go on with one that exists.")
        transport.meet(stage)

    # -- launches -------------------------------------------------------------------------------------------------
    def ordered(self, is_beside: bool) -> AbstractContextManager[OrderedStream]:
        """Work inside follows the last exchange; ``is_beside`` puts it on a stream of its own."""
        if self._ordered_streams is None:
            return nullcontext(OrderedStream(0))
        return self._ordered_streams.next(is_beside)

    def epoch(self, of_reduce: bool) -> comm_abi.CommEpoch:
        """What launches of a cast or a reduce have in common."""
        arena = self.arena
        places = arena.epoch_at(of_reduce), arena.signals_at, arena.totals_at, arena.failed_at
        failed = self._failed_peer.data_ptr()
        return comm_abi.CommEpoch(self.memory.data_ptr(), *places, failed, self.verbs.network, self.timeout_ms, 0)

    # -- failing --------------------------------------------------------------------------------------------------
    @property
    def has_failed(self) -> bool:
        """Was a wait of this rank in vain?"""
        return bool(self._failed_peer_view[0])

    def check(self, stage: str) -> None:
        """Raises ``PeerFailureError`` if a wait was in vain. The group is broken then: all later calls raise too.

        Who did not deliver may have waited itself. So the ranks tell one another for whom they wait, for one more
        timeout at most, and the error names the rank at the end of a chain of them.
        """
        found = int(self._failed_peer_view[0])
        if not found:
            self._stage = stage
            return
        if not self._told:
            self._told = self._blame(stage)
        raise PeerFailureError(self._told)

    def check_if_done(self, stage: str) -> None:
        """``check``, where launches are over when they return, as on a CPU: what they gave is not void then."""
        if self.device.type == "cpu":
            self.check(stage)

    def _awaited(self) -> list[int]:
        """Ranks for which waits of this rank were in vain; more may come within milliseconds."""
        first, *is_awaited = self._failed_peer_view.tolist()
        # An attention kernel that gives up first, which none should, knows no rank but this one.
        return [r for r, waited in enumerate(is_awaited) if waited] or [first - 1 if first <= self.world else self.rank]

    def _blame(self, stage: str) -> str:
        transport = self._transport()
        chain, about = (self._awaited()[:1], "") if transport is None else transport.blame(self._awaited, self._stage)
        *between, end = chain
        found = "" if stage == self._stage else f" or a call before it, as is found in {stage}"
        text = (
            f"{self._name(end).capitalize()} did not deliver within {self.timeout_ms / 1000:g} s in {self._stage}"
            f"{found}; results since then are void."
        )
        if between:
            waits = ", which waits for ".join(map(self._name, chain))
            text += f" This rank, {self.rank}, waits for {waits}."
        text += f"{about} Look at the log of rank {end}; make a new process group to go on."
        if transport is not None:
            transport.give_up(text)
        return text

    def _name(self, rank: int) -> str:
        return f"rank {rank} (node {self.nodes.node_of[rank]})"
