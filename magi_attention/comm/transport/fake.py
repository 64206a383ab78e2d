# SPDX-License-Identifier: Apache-2.0
"""A group of ranks inside one process, one thread each, for tests and for planning on a laptop.

>>> def rank_main(transport, add):
...     return transport.all_gather_object(transport.rank + add)
>>> FakeWorld(2).run(rank_main, 10)
[[10, 11], [10, 11]]

Every collective checks that all ranks call the same one with matching sizes and dtypes. A rank that fails, or
that returns while others still wait for it, ends their wait at once with ``PeerFailureError``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magi_attention.comm.transport.base import (
    DEFAULT_TIMEOUT_S,
    Rows,
    TransportBase,
    Work,
    check_all_to_all,
    check_reduce_op,
)
from magi_attention.comm.transport.failure import POLL_S, describe_error
from magi_attention.comm.transport.waits import Awaited, chain_of_waits
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError


class _Op:
    """One collective: what each rank brought, and whether the last to arrive has carried it out."""

    def __init__(self, kind: str):
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.is_done = False
        self.error: Exception | None = None


class _Hub:
    """State shared by all threads of one run; guarded by ``changed``."""

    def __init__(self, size: int, timeout_s: float):
        self.size, self.timeout_s = size, timeout_s
        self.changed = threading.Condition()
        self.ops: dict[tuple[tuple[int, ...], int], _Op] = {}
        self.gone: dict[int, str] = {}  # global rank -> why it takes no further part
        self.waits: dict[int, list[int]] = {}  # global ranks: who waits in vain, outside messages, and for whom

    def leave(self, rank: int, why: str) -> None:
        with self.changed:
            self.gone.setdefault(rank, why)
            self.changed.notify_all()


class FakeWork:
    def __init__(self, transport: FakeTransport, op: _Op):
        self._transport, self._op = transport, op

    def is_completed(self) -> bool:
        return self._op.is_done

    def wait(self) -> None:
        hub, op, ranks = self._transport.hub, self._op, self._transport.ranks
        deadline = time.monotonic() + hub.timeout_s
        with hub.changed:
            while not op.is_done:
                missing = [r for r, g in enumerate(ranks) if r not in op.brought]
                lost = [r for r in missing if ranks[r] in hub.gone]
                if lost:
                    reasons = " ".join(f"rank {r} {hub.gone[ranks[r]]}" for r in lost)
                    raise PeerFailureError(
                        f"Another rank failed while this one waited in {op.kind}: {reasons.rstrip('. ')}. "
                        "Fix the cause there; this error is only its echo."
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerFailureError(
                        f"After {hub.timeout_s:g} s in {op.kind}, rank {', '.join(map(str, missing))} did "
                        "not arrive. Check that every rank calls the same operations in the same order."
                    )
                hub.changed.wait(left)
            if op.error is not None:
                raise op.error


class FakeTransport(TransportBase):
    """The transport that ``FakeWorld.run`` hands to each rank; ``subgroup`` makes smaller groups."""

    def __init__(self, hub: _Hub, ranks: tuple[int, ...], global_rank: int):
        self.hub, self.ranks = hub, ranks
        self.rank, self.size, self.timeout_s = ranks.index(global_rank), len(ranks), hub.timeout_s
        self.rows_to = [0] * self.size  # rows sent to each rank by all_to_all_v, for tests that count traffic
        self._global_rank = global_rank
        self._num_ops = 0
        self._groups = {ranks: self}

    def subgroup(self, ranks: Sequence[int]) -> FakeTransport:
        """The group of these ranks of this group, in this order. Local, and the same object each time."""
        key = tuple(self.ranks[r] for r in ranks)
        if key not in self._groups:
            group = FakeTransport(self.hub, key, self._global_rank)
            group._groups = self._groups
            self._groups[key] = group
        return self._groups[key]

    def _join(self, kind: str, brought: Any, carry_out: Callable[[list], None]) -> FakeWork:
        """Takes part in this group's next collective; the last to arrive runs ``carry_out`` for all."""
        hub, key = self.hub, (self.ranks, self._num_ops)
        self._num_ops += 1
        with hub.changed:
            hub.gone.pop(self._global_rank, None)  # it reported a failure, handled it and goes on
            op = hub.ops.setdefault(key, _Op(kind))
            if op.kind != kind:
                op.error = PlanMismatchError(
                    f"Rank {self.rank} calls {kind} where another rank calls {op.kind}; all ranks of a group "
                    "must call the same collectives in the same order."
                )
            op.brought[self.rank] = brought
            if len(op.brought) == self.size:
                if op.error is None:
                    try:
                        carry_out([op.brought[r] for r in range(self.size)])
                    except Exception as exc:
                        op.error = exc
                op.is_done = True
                del hub.ops[key]
                op.brought = dict.fromkeys(op.brought)
                hub.changed.notify_all()
        return FakeWork(self, op)

    def all_to_all_v(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Rows, input_splits: Rows, async_op: bool = False
    ) -> Work:
        check_all_to_all(output, input, output_splits, input_splits, self.size)
        self.rows_to = [a + b for a, b in zip(self.rows_to, input_splits)]
        brought = (output.detach(), input.detach(), list(output_splits), list(input_splits))
        work = self._join("all_to_all_v", brought, _exchange)
        if not async_op:
            work.wait()
        return work

    def all_gather_object(self, obj: object) -> list:
        got: list = [None] * self.size

        def carry_out(brought: list) -> None:
            for place, _ in brought:
                place[:] = [item for _, item in brought]

        self._join("all_gather_object", (got, obj), carry_out).wait()
        return got

    def all_gather_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if len(sizes) != self.size or x.shape[0] != sizes[self.rank]:
            raise ContractError(
                f"Sizes {list(sizes)} must have {self.size} entries, and entry {self.rank} must be "
                f"{x.shape[0]}, the rows of this rank."
            )
        x = x.detach()
        output = x.new_empty((sum(sizes), *x.shape[1:]))

        def carry_out(brought: list) -> None:
            if len({tuple(b[2]) for b in brought}) > 1:
                raise PlanMismatchError(f"Ranks disagree about gathered sizes: {[b[2] for b in brought]}.")
            for place, _, _ in brought:
                torch.cat([b[1] for b in brought], out=place)

        self._join("all_gather_v", (output, x, list(sizes)), carry_out).wait()
        return output

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        check_reduce_op(op)

        def carry_out(brought: list) -> None:
            total = brought[0].clone()
            for other in brought[1:]:
                if other.shape != total.shape or other.dtype != total.dtype:
                    raise PlanMismatchError("Ranks reduce tensors of different shapes or dtypes.")
                if op in ("sum", "avg"):
                    total += other
                else:
                    total = torch.maximum(total, other) if op == "max" else torch.minimum(total, other)
            for place in brought:
                place.copy_(total / len(brought) if op == "avg" else total)

        work = self._join(f"all_reduce ({op})", tensor.detach(), carry_out)
        if not async_op:
            work.wait()
        return work

    def barrier(self) -> None:
        self._join("barrier", None, lambda brought: None).wait()

    def blame(self, awaited: Awaited, stage: str) -> tuple[list[int], str]:
        hub, ranks = self.hub, self.ranks
        deadline = time.monotonic() + hub.timeout_s
        with hub.changed:
            while True:
                hub.waits[self._global_rank] = [ranks[rank] for rank in awaited()]
                hub.changed.notify_all()
                chain, is_known = chain_of_waits(hub.waits[self._global_rank], hub.waits.get, hub.gone.__contains__)
                left = deadline - time.monotonic()
                if is_known or left <= 0:
                    known = hub.gone.get(chain[-1])
                    return [ranks.index(rank) for rank in chain], f" It {known.rstrip('. ')}." if known else ""
                hub.changed.wait(min(left, POLL_S))

    def report_failure(self, exc: BaseException, stage: str) -> None:
        self.hub.leave(self._global_rank, f"failed: {describe_error(exc, stage)}")


def _exchange(brought: list) -> None:
    """All-to-all-v between the (output, input, output splits, input splits) of all ranks."""
    for i, (_, x, _, in_splits) in enumerate(brought):
        for j, (y, _, out_splits, _) in enumerate(brought):
            if in_splits[j] != out_splits[i]:
                raise PlanMismatchError(
                    f"Rank {i} sends {in_splits[j]} rows to rank {j}, which expects {out_splits[i]}; their "
                    "plans or arguments differ."
                )
            if in_splits[j] and (x.dtype != y.dtype or x.shape[1:] != y.shape[1:]):
                raise PlanMismatchError(
                    f"Rank {i} sends rows {tuple(x.shape[1:])} {x.dtype} to rank {j}, which expects "
                    f"{tuple(y.shape[1:])} {y.dtype}; use equal shapes and dtypes on all ranks."
                )
    for i, (_, x, _, in_splits) in enumerate(brought):
        parts = x.split(in_splits)
        for j, (y, _, out_splits, _) in enumerate(brought):
            start = sum(out_splits[:i])
            y[start : start + out_splits[i]].copy_(parts[j])


class FakeWorld:
    """``size`` ranks in one process; ``timeout_s`` bounds every wait for other ranks."""

    def __init__(self, size: int, timeout_s: float = DEFAULT_TIMEOUT_S):
        if size < 1:
            raise ContractError(f"A world needs at least one rank, not {size}.")
        self.size, self.timeout_s = size, timeout_s

    def run(self, fn: Callable[..., Any], *args: Any) -> list:
        """``fn(transport, *args)`` on every rank at once; returns the results in rank order. The error of the
        lowest failing rank that failed on its own is raised again."""
        hub = _Hub(self.size, self.timeout_s)
        results: list = [None] * self.size
        errors: dict[int, BaseException] = {}

        def rank_main(rank: int) -> None:
            try:
                results[rank] = fn(FakeTransport(hub, tuple(range(self.size)), rank), *args)
                hub.leave(rank, "returned from its function without taking part.")
            except BaseException as exc:
                errors[rank] = exc
                hub.leave(rank, f"failed: {describe_error(exc, '')}")

        threads = [
            threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.size)
        ]
        for thread in threads:
            thread.start()
        # why so much later than the last wait: what a rank does besides has no limit, and the machine may be busy
        deadline = time.monotonic() + self.timeout_s + DEFAULT_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._raise_first(errors, threads)
        return results

    def _raise_first(self, errors: dict[int, BaseException], threads: list[threading.Thread]) -> None:
        own = [r for r in sorted(errors) if not isinstance(errors[r], PeerFailureError)]
        for rank in own or sorted(errors):
            raise errors[rank]
        stuck = [t for t in threads if t.is_alive()]
        if stuck:
            frames = sys._current_frames()
            where = "".join(
                f"\n{t.name}:\n{''.join(traceback.format_stack(frames[t.ident])[-4:])}"
                for t in stuck
                if t.ident in frames
            )
            raise PeerFailureError(f"{', '.join(t.name for t in stuck)} did not finish; look here:{where}")
