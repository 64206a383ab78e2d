# SPDX-License-Identifier: Apache-2.0
"""What the communication layer needs from a group of ranks, and the group of one rank.

Everything above is written against ``Transport``: ``TorchTransport`` speaks through torch.distributed,
``FakeTransport`` between threads of one process, ``SingleTransport`` is one rank and never communicates.

Ranks in arguments are always group ranks, 0 .. size-1; ``ranks`` maps them to global ranks.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from magi_attention.comm.transport.consistency import KnownUses, Use, agree_by_messages, decline_by_messages
from magi_attention.comm.transport.failure import describe_error
from magi_attention.comm.transport.progress import Progress
from magi_attention.comm.transport.waits import Awaited
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError

DEFAULT_TIMEOUT_S = 600.0
REDUCE_OPS = ("sum", "avg", "max", "min")


Rows = Sequence[int]  # rows that each rank sends or receives, in order of rank


@runtime_checkable
class Work(Protocol):
    """An operation under way. For CUDA tensors ``wait`` orders the current stream, the host runs on."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Watched(Protocol):
    """What finds out about failures that no message shows. ``check`` raises them."""

    @property
    def has_failed(self) -> bool: ...

    def check(self, stage: str) -> None: ...


class AllToAll(Protocol):
    """What group casts and reduces need from a group of ranks."""

    rank: int
    size: int
    ranks: tuple[int, ...]

    def all_to_all_v(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Rows, input_splits: Rows, async_op: bool = False
    ) -> Work:
        """Sends ``input_splits[r]`` consecutive rows (dim 0) of ``input`` to each rank r, in order of r;
        ``output`` receives ``output_splits[r]`` rows from each r. Same dtype and trailing dims everywhere."""
        ...


@runtime_checkable
class Transport(AllToAll, Protocol):
    """A group of ranks that exchange tensors. Every rank calls every method, except ``guard``."""

    timeout_s: float

    def all_gather_object(self, obj: object) -> list:
        """The objects of all ranks, in rank order; each is pickled. Blocks the host."""
        ...

    def all_gather_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Rows of all ranks, one after the other: (sum(sizes), ...); rank r gives ``sizes[r]`` rows."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Reduces in place over all ranks; ``op`` is one of sum, avg, max, min."""
        ...

    def reduce_scatter_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sums the ``x`` of all ranks, (sum(sizes), ...), and keeps rows of this rank: (sizes[rank], ...)."""
        ...

    def barrier(self) -> None: ...

    def guard(self, stage: str) -> AbstractContextManager[None]:
        """An error inside is told to the other ranks, which then raise ``PeerFailureError`` instead of
        waiting, and is raised again here."""
        ...

    def knows(self, use: str) -> bool:
        """Has the group agreed on ``use``? The same answer on all ranks that do the same; costs next to nothing."""
        ...

    def agree(self, use: Use, x: torch.Tensor, seed: str = "", is_checked: bool = False) -> None:
        """Compares ``use`` over the ranks before ``x`` travels; see ``consistency.py``. Collective. ``seed`` is of
        this call alone. Where ``is_checked``, the host waits for all ranks in every call.

        Raises:
            PlanMismatchError: on every rank, if uses differ.
        """
        ...

    def decline(self, exc: BaseException, x: object, stage: str) -> None:
        """In place of ``agree``, where this rank cannot make the call because of ``exc``, which it is about to raise:
        the others raise ``PeerFailureError``. Does nothing for a tensor ``x`` of a GPU; ``guard`` tells there."""
        ...


class DoneWork:
    """An operation that had finished when it was returned."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class PostWork:
    """``work``, followed once by ``post`` (a copy into place) at the first ``wait``."""

    def __init__(self, work: Work, post: Callable[[], object]):
        self._work = work
        self._post: Callable[[], object] | None = post

    def wait(self) -> None:
        self._work.wait()
        if self._post is not None:
            post, self._post = self._post, None
            post()

    def is_completed(self) -> bool:
        return self._post is None and self._work.is_completed()


def check_reduce_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ContractError(f"Reduce operation {op!r} is unknown; use one of {', '.join(REDUCE_OPS)}.")


def check_all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    size: int,
) -> None:
    """Raises ``ContractError`` unless the split lists have ``size`` entries and cover the tensors."""
    for name, x, splits in (("output", output, output_splits), ("input", input, input_splits)):
        if len(splits) != size:
            raise ContractError(f"{len(splits)} {name} splits for {size} ranks; give one row count per rank.")
        if x.ndim == 0 or sum(splits) != x.shape[0] or any(n < 0 for n in splits):
            raise ContractError(
                f"The {name} splits {list(splits)} must be >= 0 and add up to the rows of a tensor of shape "
                f"{tuple(x.shape)}."
            )
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise ContractError(
            f"Input {tuple(input.shape)} {input.dtype} and output {tuple(output.shape)} {output.dtype} must "
            "agree in dtype and in all dims but the first."
        )


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as (rows, bytes per row), rows being dim 0; no copy."""
    if x.numel() == 0:
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        return x.new_empty((x.shape[0], row_bytes), dtype=torch.uint8)
    return x.reshape(x.shape[0], -1).view(torch.uint8)


class TransportBase(ABC):
    """What every transport does alike, built on ``all_to_all_v``."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout_s: float

    @abstractmethod
    def all_to_all_v(self, output, input, output_splits, input_splits, async_op=False) -> Work: ...

    progress: Progress | None = None  # where this rank tells what it is at, if anybody could read it

    @abstractmethod
    def all_gather_object(self, obj: object) -> list: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def report_failure(self, exc: BaseException, stage: str) -> None: ...

    def knows(self, use: str) -> bool:
        return self.size == 1 or use in self._known_uses

    def agree(self, use: Use, x: torch.Tensor, seed: str = "", is_checked: bool = False) -> None:
        if self.size > 1:
            agree_by_messages(self, self._known_uses, use, seed)

    def decline(self, exc: BaseException, x: object, stage: str) -> None:
        if self.size > 1 and self._meets_for(x):
            try:
                decline_by_messages(self, describe_error(exc, stage))
            except (PeerFailureError, PlanMismatchError):
                return  # why: what stopped this rank comes first, and the others know of a failure
            mark_reported(exc)

    def _meets_for(self, x: object) -> bool:
        """Do the hosts of all ranks exchange messages before tensors like this one travel?"""
        return True

    def gather_tokens(self, token: int) -> list[int]:
        """The numbers of all ranks, each in [0, 2**63), in rank order. Blocks the host."""
        return self.all_gather_object(token)

    @cached_property
    def _known_uses(self) -> KnownUses:
        return KnownUses()

    def reduce_scatter_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All parts travel by all-to-all-v and are added in rank order, so that the result has the same
        bits on every run. 16-bit floats are added in float32."""
        own = int(sizes[self.rank])
        if len(sizes) != self.size or x.shape[0] != sum(sizes):
            raise ContractError(
                f"{len(sizes)} sizes of sum {sum(sizes)} for {self.size} ranks and {x.shape[0]} rows; give "
                "one row count per rank that together cover dim 0."
            )
        if self.size == 1:
            return x.clone()
        parts = x.new_empty((self.size * own, *x.shape[1:]))
        self.all_to_all_v(parts, x.contiguous(), [own] * self.size, list(sizes)).wait()
        if x.dtype in (torch.bfloat16, torch.float16):
            parts = parts.float()
        total = parts[:own].clone()
        for r in range(1, self.size):
            total += parts[r * own : (r + 1) * own]
        return total.to(x.dtype)

    def object_device(self) -> torch.device:
        return torch.device("cpu")

    # -- what lives as long as the group ------------------------------------------------------------------
    @cached_property
    def kept(self) -> dict[Any, Any]:
        """What is made once for the group, by name. It goes with the group, which it must not refer to."""
        return {}

    @property
    def watchers(self) -> list[Callable[[str], None]]:
        """What looks for failures that no message of this transport shows, each a function that raises."""
        return self.kept.setdefault("watchers", [])

    def watch(self, watched: Watched) -> None:
        """Asks ``watched`` for failures as one of ``watchers``, as long as it lives; nothing here holds it."""
        this = weakref.ref(watched)

        def look(stage: str) -> None:
            found = this()
            if found is not None and found.has_failed:
                found.check(stage)

        self.watchers.append(look)

    def reference(self) -> Callable[[], TransportBase | None]:
        """A weak reference to a transport of the group: None once that is gone."""
        return weakref.ref(self)

    def at_end(self, action: Callable[[], None]) -> None:
        """Has ``action``, which may be collective, called on all ranks when the group has been destroyed."""
        weakref.finalize(self, action).atexit = False

    def meet(self, stage: str) -> None:
        """Blocks the host until all ranks are here in ``stage``; ``PeerFailureError`` names those who do not come."""
        self.barrier()

    def blame(self, awaited: Awaited, stage: str) -> tuple[list[int], str]:
        """After this rank has waited for ``awaited`` in vain, outside the messages of this transport.

        Returns:
            One that it waited for, whom that waits for, and so on: the last one tells of nobody. And sentences on what
            is known of the last one, each beginning with a space.
        """
        return awaited()[:1], ""

    def give_up(self, text: str) -> None:
        """Tells all ranks that no message can pass any more, and why."""
        return None

    def check_alive(self) -> None:
        """Raises ``ContractError`` if the group was destroyed."""
        return None

    def guard(self, stage: str) -> AbstractContextManager[None]:
        """See ``Transport.guard``. An error that every rank raises alike (``PlanMismatchError``) or that
        tells of another rank (``PeerFailureError``) is not reported again."""
        return _Guard(self, stage)


class _Guard(AbstractContextManager[None]):
    """A class, because a generator costs several times as much in every layer of a model."""

    def __init__(self, transport: TransportBase, stage: str) -> None:
        self._transport, self._stage = transport, stage

    def __enter__(self) -> None:
        self._transport.check_alive()
        progress = self._transport.progress
        if progress is not None:
            self._before = progress.begin(self._stage)

    def __exit__(self, kind: type | None, exc: BaseException | None, trace: object) -> None:
        progress = self._transport.progress
        if progress is not None:
            progress.end(self._before)
        if exc is None or isinstance(exc, (PeerFailureError, PlanMismatchError)):
            return
        if not getattr(exc, "_magi_reported", False):
            self._transport.report_failure(exc, self._stage)
            mark_reported(exc)


def mark_reported(exc: BaseException) -> None:
    """Other ranks know of it, and need not be told again."""
    try:
        exc._magi_reported = True  # type: ignore[attr-defined]
    except AttributeError:  # why: exceptions with __slots__ only get reported once per guard
        pass


class SingleTransport(TransportBase):
    """A group of one rank. Copies, never communicates; ``global_rank`` is only reported in ``ranks``."""

    def __init__(self, global_rank: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S):
        self.rank, self.size, self.ranks, self.timeout_s = 0, 1, (global_rank,), timeout_s

    def all_to_all_v(self, output, input, output_splits, input_splits, async_op=False) -> Work:
        check_all_to_all(output, input, output_splits, input_splits, 1)
        output.detach().copy_(input.detach())
        return DoneWork()

    def all_gather_object(self, obj: object) -> list:
        return [obj]

    def all_gather_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if list(sizes) != [x.shape[0]]:
            raise ContractError(f"Sizes {list(sizes)} must be [{x.shape[0]}], the rows of the only rank.")
        return x.detach().clone()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        check_reduce_op(op)
        return DoneWork()

    def barrier(self) -> None:
        return None

    def report_failure(self, exc: BaseException, stage: str) -> None:
        return None
